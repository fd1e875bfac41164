"""Whatever goes wrong is one line on stderr and an exit code, never a traceback."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli.conftest import Run
from dominotree.pair import Pair


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ([""], "empty"),
        ([" \n"], "empty"),
        (["hello", "world"], "extra argument"),
        (["hello", "--budget", "many"], "--budget"),
        (["hello", "--budget", "-1"], "budget"),
        (["hello", "--budget", "1025"], "budget"),
        (["hello", "--candidates", "-1"], "candidates"),
        (["hello", "--node-topk", "0"], "node_topk"),
        (["hello", "--temperature", "-0.1"], "temperature"),
        (["hello", "--temperature", "inf"], "temperature"),
        (["hello", "--top-p", "0"], "top_p"),
        (["hello", "--top-p", "nan"], "top_p"),
        (["hello", "--min-p", "2"], "min_p"),
        (["hello", "--top-k", "-1"], "top_k"),
        (["hello", "--repetition-penalty", "0"], "repetition_penalty"),
        (["hello", "--max-new-tokens", "0"], "max_new_tokens"),
        (["hello", "--seed", "1.5"], "--seed"),
        (["hello", "--stop", ""], "stop"),
        (["hello", "--logit-bias", "a=b"], "logit-bias"),
        (["hello", "--logit-bias", "5"], "logit-bias"),
        (["hello", "--logit-bias", "5=nan"], "logit_bias"),
        (["hello", "--logit-bias", "9999=1"], "9999"),
        (["hello", "--context", "1"], "context"),
        (["hello", "--context", "5000"], "4096"),
        (["hello", "--context", "10"], "context is 10"),
        (["hello", "--threads", "0"], "threads"),
        (["hello", "--device", "gpu"], "gpu"),
        (["hello", "--dtype", "int4"], "int4"),
        (["hello", "--method", "eagle"], "eagle"),
        (["hello", "--method", "ar", "--budget", "4"], "--budget has no effect"),
        (["hello", "--method", "ar"], "--drafter has no effect"),
        (["hello", "--method", "lookup"], "--drafter has no effect"),
        (["hello", "--method", "lookup", "--drafter", "none", "--candidates", "4"], "--candidates has no effect"),
        (["hello", "--method", "domino", "--budget", "4"], "--budget has no effect"),
        (["hello", "--method", "ddtree", "--candidates", "4"], "--candidates has no effect"),
        (["hello", "--method", "ar", "--drafter", "none", "--noise-aware"], "--noise-aware has no effect"),
        (["hello", "--dflash-drafter", "some-folder"], "--dflash-drafter has no effect"),
        (["hello", "--system", "x", "--raw"], "--system has no effect"),
        (["hello", "--compare", "--method", "ar"], "--compare"),
        (["\udcff"], "UTF-8"),
        (["hello", "--nonsense"], "--nonsense"),
    ],
    ids=lambda value: " ".join(value).encode("ascii", "replace").decode() if isinstance(value, list) else None,
)
def test_wrong_use_is_one_line_and_exit_2(run: Run, args: list[str], word: str) -> None:
    result = run("generate", *args)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ") and word in line


@pytest.mark.parametrize("args", [["--target", "no-such-model"], ["--target", "./no-such-folder"]])
def test_an_unknown_model_is_one_line_and_exit_1(bare: Run, args: list[str]) -> None:
    result = bare("generate", "hello", *args)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ") and "no-such" in line


def test_top_p_at_temperature_0_is_said_to_change_nothing(run: Run) -> None:
    result = run("generate", "hello", "--top-p", "0.5", "--max-new-tokens", "2")
    assert result.exit_code == 0
    assert result.stderr.startswith("Note: --top-p cannot change anything at temperature 0")


def test_an_empty_raw_prompt_starts_from_the_beginning_of_text(run: Run) -> None:
    result = run("generate", "", "--raw", "--max-new-tokens", "3", "--json")
    assert json.loads(result.stdout)["prompt_tokens"] == 1


def test_input_that_is_not_text_is_refused(run: Run) -> None:
    result = run("generate", "-", input=b"\xff\xfe")
    assert result.exit_code == 2 and "UTF-8" in result.stderr


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_damaged_model_folder_is_one_line(bare: Run, model: Path, tmp_path: Path, file: str) -> None:
    for source in model.iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    (tmp_path / file).write_text("{ damaged")
    result = bare("generate", "hello", "--target", tmp_path)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")


def test_what_nobody_foresaw_is_one_line_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(Pair, "stream", fail)
    result = run("generate", "hello")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: RuntimeError: first line second line (set DOMINOTREE_TRACEBACK=1")


LONG = ("--raw", "--ignore-eos", "--max-new-tokens", "4000", "--dtype", "float32")


def start(model: Path, drafter: Path, *args: str, **options: object) -> subprocess.Popen[bytes]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        [sys.executable, "-m", "dominotree", *args, "--target", str(model), "--drafter", str(drafter)],
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        **{**pipes, **options},  # type: ignore[call-overload]
    )


def test_ctrl_c_ends_generate_with_130_and_one_line(model: Path, drafter: Path) -> None:
    process = start(model, drafter, "generate", "hello", *LONG)
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.decode() == "Interrupted.\n"


def test_a_closed_pipe_ends_generate_quietly(model: Path, drafter: Path) -> None:
    process = start(model, drafter, "generate", "hello", *LONG)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 1
