"""Batches: every line's answer is the one it has alone, and a kill loses and doubles nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.conftest import Run, bare, drafter, model, run
from dominotree.batch import OPTIONS, Job, Line, Results, _answered, line_seed, records, room
from dominotree.decode import Decoder
from dominotree.errors import InvalidRequest
from dominotree.pair import Pair, load
from dominotree.sampling import Sampler, SamplingParams

__all__ = ["bare", "drafter", "model", "run"]

LINES: list[dict[str, Any]] = [
    {"id": "a", "prompt": "one", "max_new_tokens": 30},
    {"prompt": "two, and a prompt that is longer than the others are", "seed": 5},
    {"id": 3, "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "three"}]},
    {"prompt": [7, 8, 9], "temperature": 0},
    {"prompt": "five", "temperature": 1.5, "top_k": 40, "logit_bias": {"70": 2.5}},
    {"prompt": "six", "stop": ["e", "t"], "max_new_tokens": 40},
    {"prompt": "seven", "max_new_tokens": 1},
    {"prompt": "eight", "max_new_tokens": 24},
]


@pytest.fixture(scope="module")
def pair(model: Path, drafter: Path) -> Pair:
    return load(target=str(model), drafter=str(drafter), dtype="float32", max_batch=3)


def written(path: Path, lines: Sequence[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def alone(pair: Pair, number: int, line: dict[str, Any], job: Job, method: str) -> list[int]:
    """What `generate` answers to the line by itself."""
    options = {name: value for name, value in line.items() if name in OPTIONS}
    if "logit_bias" in options:
        options["logit_bias"] = {int(token): bias for token, bias in options["logit_bias"].items()}
    params = {"seed": line_seed(job.seed, number), **vars(job.sampling), **options}
    if job.sampling.seed is None and "seed" not in options:
        params["seed"] = line_seed(job.seed, number)
    return pair.generate(line.get("prompt", line.get("messages")), method=method, **params).token_ids


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_record_is_the_answer_of_generate_alone(pair: Pair, temperature: float) -> None:
    job = Job(SamplingParams(temperature=temperature, max_new_tokens=20, ignore_eos=True), seed=11)
    lines = [Line(number, json.dumps(line).encode()) for number, line in enumerate(LINES, start=1)]
    drafting = pair.drafting("dominotree", 6)
    came = {r["line"]: r for r in records(pair, lines, job, drafting, room(pair, lines, job, drafting))}
    assert sorted(came) == list(range(1, len(LINES) + 1))
    for number, line in enumerate(LINES, start=1):
        for method in ("ar", "dominotree"):
            assert came[number]["token_ids"] == alone(pair, number, line, job, method), (number, method)
        assert came[number].get("id", "none") == line.get("id", "none")


def test_the_output_does_not_depend_on_how_many_are_decoded_at_once(run: Run, tmp_path: Path) -> None:
    source, found = written(tmp_path / "in.jsonl", LINES), []
    for most in (1, 4):
        out = tmp_path / f"{most}.jsonl"
        result = run("batch", source, out, "--temperature", 0.8, "--max-batch", most, "--max-new-tokens", 12)
        assert result.exit_code == 0, result.stderr
        found.append(out.read_bytes())
    assert found[0] == found[1]
    assert [record["line"] for record in map(json.loads, found[0].splitlines())] == list(range(1, len(LINES) + 1))


def test_lines_without_a_seed_draw_differently_and_as_the_common_seed_says(run: Run, tmp_path: Path) -> None:
    source, texts = written(tmp_path / "in.jsonl", [{"prompt": "same"}, {"prompt": "same"}]), []
    for seed in (1, 2):
        run("batch", source, tmp_path / f"{seed}.jsonl", "--temperature", 1, "--seed", seed, "--max-new-tokens", 16)
        texts += [record["token_ids"] for record in read(tmp_path / f"{seed}.jsonl")]
    assert len({tuple(tokens) for tokens in texts}) == 4


BAD = {
    "{not json": "is not JSON",
    "[1, 2]": "a JSON list",
    '{"id": "x"}': "one of prompt and messages",
    '{"prompt": "a", "messages": []}': "one of prompt and messages",
    '{"prompt": 5}': "neither text nor a list of token ids",
    '{"prompt": [999999]}': "token id 999999",
    '{"prompt": "a", "temperature": -1}': "temperature is -1",
    '{"prompt": "a", "temprature": 1}': "'temprature' is unknown",
    '{"prompt": "a", "logits_processors": []}': "'logits_processors' is unknown",
    '{"prompt": "a", "logit_bias": {"x": 1}}': "logit_bias",
    '{"prompt": "a", "id": {}}': "id is {}",
    '{"prompt": "\\ud800"}': "half a character",
    '{"messages": [{"role": "user"}]}': "not a dict with 'role' and 'content'",
    '{"messages": "hello"}': "no list of objects",
    json.dumps({"id": "long", "prompt": "x" * 5000}): "the context is 4096",
    "[" * 100_000: "is not JSON",
}


def test_lines_that_cannot_run_become_errors_and_stop_nothing_else(run: Run, tmp_path: Path) -> None:
    good = {"prompt": "fine", "max_new_tokens": 4}
    source = written(tmp_path / "in.jsonl", [good, "", *BAD, good])
    result = run("batch", source, tmp_path / "out.jsonl")
    assert result.exit_code == 3
    assert f"{len(BAD) + 2} records, {len(BAD)} of them errors" in result.stderr
    first, *between, last = read(tmp_path / "out.jsonl")
    assert "error" not in first and "error" not in last and last["line"] == len(BAD) + 3
    for record, reason in zip(between, BAD.values(), strict=True):
        assert reason in record["error"] and "\n" not in record["error"]
        assert set(record) <= {"line", "id", "error"}
    assert between[-2]["id"] == "long"


def test_a_request_that_fails_while_it_is_decoded_becomes_an_error_alone(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = Sampler.choose

    def fail_for_seed_13(self: Sampler, logits: torch.Tensor, path: Sequence[int]) -> int:
        return choose(self, logits * float("nan") if self.seed == 13 and len(path) == 3 else logits, path)

    monkeypatch.setattr(Sampler, "choose", fail_for_seed_13)
    texts = [{"prompt": "a"}, {"prompt": "b", "seed": 13}, {"prompt": "c"}, {"prompt": "d"}]
    lines = [Line(number, json.dumps(line).encode()) for number, line in enumerate(texts, start=1)]
    job, drafting = Job(SamplingParams(temperature=1, max_new_tokens=8, ignore_eos=True)), pair.drafting()
    came = {r["line"]: r for r in records(pair, lines, job, drafting, room(pair, lines, job, drafting))}
    assert "NaN" in came[2]["error"]
    assert all(came[number]["new_tokens"] == 8 for number in (1, 3, 4))


# Killed and resumed


@pytest.fixture
def begun(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An input whose run was ended after some records; `in.jsonl`, `out.jsonl` and its part are in the folder."""
    source, steps = written(tmp_path / "in.jsonl", LINES), 0
    step = Decoder.step

    def ended(self: Decoder) -> None:
        nonlocal steps
        steps += 1
        if steps > 25:
            raise KeyboardInterrupt
        step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "step", ended)
        result = run("batch", source, tmp_path / "out.jsonl", *COMMON)
    assert result.exit_code == 130 and "the same command goes on" in result.stderr
    assert 1 < len(read(tmp_path / "out.jsonl.part")) < len(LINES) and not (tmp_path / "out.jsonl").exists()
    yield tmp_path


COMMON = ("--temperature", 0.7, "--max-new-tokens", 12, "--max-batch", 2)


def whole(run: Run, folder: Path) -> bytes:
    """What a run gives that nothing disturbs."""
    assert run("batch", folder / "in.jsonl", folder / "whole.jsonl", *COMMON).exit_code == 0
    return (folder / "whole.jsonl").read_bytes()


def test_a_run_goes_on_where_it_ended(run: Run, begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, before = whole(run, begun), read(begun / "out.jsonl.part")[1:]
    made = []
    monkeypatch.setattr("dominotree.batch._answered", lambda *given: (made.append(1), _answered(*given))[1])
    assert run("batch", begun / "in.jsonl", begun / "out.jsonl", *COMMON).exit_code == 0
    assert (begun / "out.jsonl").read_bytes() == expected
    assert len(made) == len(LINES) - len(before)
    assert {path.name for path in begun.iterdir()} == {"in.jsonl", "out.jsonl", "whole.jsonl"}


@pytest.mark.parametrize("torn", [1, 20])
def test_a_last_line_that_was_cut_off_is_decoded_again(run: Run, begun: Path, torn: int) -> None:
    part = begun / "out.jsonl.part"
    part.write_bytes(part.read_bytes()[:-torn])
    assert run("batch", begun / "in.jsonl", begun / "out.jsonl", *COMMON).exit_code == 0
    assert (begun / "out.jsonl").read_bytes() == whole(run, begun)


def test_a_part_can_be_cut_off_again_and_again(tmp_path: Path) -> None:
    output, sizes = tmp_path / "out.jsonl", []
    for number in (1, 2, 3, 3):
        with Results(output, {"seed": 1}) as results:
            sizes.append(len(results))
            results.write({"line": number, "text": "x" * 50})
            results.write({"line": number + 1, "text": "y" * 50})
        part = output.with_name("out.jsonl.part")
        part.write_bytes(part.read_bytes()[:-9])
    assert sizes == [0, 1, 2, 3]
    with Results(output, {"seed": 1}) as results:
        results.write({"line": 4, "text": ""})
        results.finish()
    assert [record["line"] for record in read(output)] == [1, 2, 3, 4]


def test_two_processes_do_not_write_one_output(tmp_path: Path) -> None:
    with Results(tmp_path / "out.jsonl", {}), pytest.raises(InvalidRequest, match="another process writes"):
        Results(tmp_path / "out.jsonl", {})


def test_a_first_line_that_was_cut_off_begins_anew(run: Run, begun: Path) -> None:
    part = begun / "out.jsonl.part"
    part.write_bytes(part.read_bytes()[:30])
    assert run("batch", begun / "in.jsonl", begun / "out.jsonl", *COMMON).exit_code == 0
    assert (begun / "out.jsonl").read_bytes() == whole(run, begun)


def test_a_kill_between_the_output_and_the_removal_of_its_part_is_mended(run: Run, begun: Path) -> None:
    part = (begun / "out.jsonl.part").read_bytes()
    assert run("batch", begun / "in.jsonl", begun / "out.jsonl", *COMMON).exit_code == 0
    (begun / "out.jsonl.part").write_bytes(part)
    assert run("batch", begun / "in.jsonl", begun / "out.jsonl", *COMMON).exit_code == 0
    assert not (begun / "out.jsonl.part").exists()


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("--temperature", 0.8), "temperature 0.7"),
        (("--seed", 4), "seed 0"),
        (("--budget", 3), "budget null"),
        (("--raw",), "raw false"),
        (("--system", "s"), "system null"),
    ],
)
def test_another_command_does_not_go_on_with_it(run: Run, begun: Path, args: tuple[Any, ...], named: str) -> None:
    before = (begun / "out.jsonl.part").read_bytes()
    result = run("batch", begun / "in.jsonl", begun / "out.jsonl", *COMMON, *args)
    assert result.exit_code == 2 and named in result.stderr and result.stderr.count("\n") == 1
    assert (begun / "out.jsonl.part").read_bytes() == before


def test_another_input_does_not_go_on_with_it(run: Run, begun: Path) -> None:
    written(begun / "in.jsonl", LINES[:-1])
    result = run("batch", begun / "in.jsonl", begun / "out.jsonl", *COMMON)
    assert result.exit_code == 2 and "the input has changed" in result.stderr


def test_how_many_are_decoded_at_once_may_change(run: Run, begun: Path) -> None:
    assert run("batch", begun / "in.jsonl", begun / "out.jsonl", *COMMON, "--max-batch", 5).exit_code == 0
    assert (begun / "out.jsonl").read_bytes() == whole(run, begun)


def test_an_output_that_is_there_is_not_written_over(run: Run, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("mine\n")
    result = run("batch", written(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl")
    assert result.exit_code == 2 and "is there already" in result.stderr
    assert (tmp_path / "out.jsonl").read_text() == "mine\n"


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("none.jsonl", "out.jsonl"), "cannot be read"),
        (("empty.jsonl", "out.jsonl"), "has no lines"),
        (("in.jsonl", "none/out.jsonl"), "does not exist"),
        (("in.jsonl", "in.jsonl"), "is there already"),
        (("in.jsonl", "out.jsonl", "--method", "adaptive"), "needs a cost profile"),
        (("in.jsonl", "out.jsonl", "--workers", 2), "--workers has no effect without --ray"),
    ],
)
def test_wrong_use_is_one_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[Any, ...], named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "in.jsonl", LINES)
    (tmp_path / "empty.jsonl").write_text("\n\n")
    result = run("batch", *args)
    assert result.exit_code == 2 and named in result.stderr and result.stderr.count("\n") == 1
    assert read(tmp_path / "in.jsonl") == LINES


@pytest.mark.parametrize("ray", [False, True])
def test_what_can_be_read_only_once_is_refused(run: Run, tmp_path: Path, ray: bool) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    result = run("batch", pipe, tmp_path / "out.jsonl", *(["--ray"] if ray else []))
    assert result.exit_code == 2 and "no regular file" in result.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_an_input_that_changes_meanwhile_makes_no_output(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = written(tmp_path / "in.jsonl", LINES)
    monkeypatch.setattr("dominotree.batch.records", lambda *_: iter(()))
    result = run("batch", source, tmp_path / "out.jsonl")
    assert result.exit_code == 2 and "must not change meanwhile" in result.stderr
    assert not (tmp_path / "out.jsonl").exists() and (tmp_path / "out.jsonl.part").exists()


def test_a_file_of_someone_elses_in_the_place_of_the_part_is_left_alone(tmp_path: Path) -> None:
    part = tmp_path / "out.jsonl.part"
    part.write_text("my notes, without a line end")
    with pytest.raises(InvalidRequest, match="not of a batch"):
        Results(tmp_path / "out.jsonl", {"seed": 1})
    assert part.read_text() == "my notes, without a line end"


def test_trees_have_the_pairs_budget_where_none_is_named(
    run: Run, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    real = Decoder.add
    monkeypatch.setattr(Decoder, "add", lambda self, request: (seen.append(request.drafting), real(self, request))[1])
    assert run("batch", written(tmp_path / "in.jsonl", LINES[:1]), tmp_path / "out.jsonl").exit_code == 0
    assert {(d.method, d.budget) for d in seen} == {(pair.default_method, pair.default_budget)}


def test_a_killed_process_loses_and_doubles_nothing(model: Path, drafter: Path, run: Run, tmp_path: Path) -> None:
    written(tmp_path / "in.jsonl", LINES * 3)
    command = ["batch", "in.jsonl", "out.jsonl", "--target", model, "--drafter", drafter, "--dtype", "float32", *COMMON]
    part = tmp_path / "out.jsonl.part"
    child = subprocess.Popen([sys.executable, "-c", SLOW, *map(str, command)], cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        while child.poll() is None and (not part.exists() or part.read_bytes().count(b"\n") < 4):
            time.sleep(0.01)
        os.kill(child.pid, signal.SIGKILL)
    finally:
        child.wait()
    assert 4 <= part.read_bytes().count(b"\n") <= len(LINES) * 3
    assert run("batch", tmp_path / "in.jsonl", tmp_path / "out.jsonl", *COMMON).exit_code == 0
    assert (tmp_path / "out.jsonl").read_bytes() == whole(run, tmp_path)


SLOW = """
import sys, time
from dominotree.cli import main
from dominotree.decode import Decoder
from dominotree.errors import InvalidRequest
step = Decoder.step
Decoder.step = lambda self: (time.sleep(0.02), step(self))[1]
main()
"""
