"""`dominotree generate`: what it prints where, and that every flag arrives."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

from cli.conftest import Run, byte_tokenizer
from dominotree.cli import common
from dominotree.cli.generate import generate
from dominotree.methods import DEFAULT_BUDGET, DEFAULT_CANDIDATES, DEFAULT_CAP
from dominotree.pair import AVX2_BUDGET, CPU_BUDGET, FP32_CPU_BUDGET, Pair
from dominotree.sampling import Sampler, SamplingParams

FIELDS = {
    "text": str,
    "token_ids": list,
    "finish_reason": str,
    "prompt_tokens": int,
    "new_tokens": int,
    "rounds": int,
    "mean_accepted": float,
    "decode_s": float,
    "tokens_per_s": float,
    "stage_ms": dict,
    "method": str,
    "budget": int,
    "seed": int,
}


def record(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def scripted(monkeypatch: pytest.MonkeyPatch, text: str) -> list[int]:
    """Has the target say `text`, whatever it would have said; needs a temperature above 0."""
    tokens = byte_tokenizer().encode(text).ids

    def choose(self: Sampler, logits: torch.Tensor, path: Sequence[int]) -> int:
        return tokens[len(path)] if len(path) < len(tokens) else 1

    monkeypatch.setattr(Sampler, "choose", choose)
    return tokens


def test_text_goes_to_stdout_and_two_lines_of_statistics_to_stderr(run: Run) -> None:
    result = run("generate", "hello", "--max-new-tokens", 12, "--ignore-eos")
    assert result.exit_code == 0
    assert result.stdout.endswith("\n")
    first, second = result.stderr.splitlines()
    assert first.startswith("12 tokens in ") and "tau" in first and "finish reason length" in first
    assert re.fullmatch(r"lookuptree, budget \d+, float32 on cpu, draft .* ms a round", second)


def test_json_is_one_object_with_the_documented_fields(run: Run) -> None:
    result = run("generate", "hello", "--max-new-tokens", 12, "--json")
    found = record(result)
    assert {name: type(value) for name, value in found.items()} == FIELDS
    assert list(found["stage_ms"]) == ["draft", "build", "verify", "commit"]
    assert found["new_tokens"] == len(found["token_ids"])
    assert result.stdout.count("\n") == 1
    assert result.stderr == ""


def test_new_tokens_are_one_from_prefill_and_the_rest_from_rounds(run: Run) -> None:
    found = record(run("generate", "hello", "--max-new-tokens", 30, "--json"))
    assert found["new_tokens"] == 1 + round(found["rounds"] * found["mean_accepted"])


def test_one_token_makes_no_round_and_divides_by_nothing(run: Run) -> None:
    found = record(run("generate", "hello", "--max-new-tokens", 1, "--json"))
    assert (found["rounds"], found["mean_accepted"], found["new_tokens"]) == (0, 0.0, 1)
    assert "0 rounds" in run("generate", "hello", "--max-new-tokens", 1).stderr


@pytest.mark.parametrize("seed", range(4))
def test_streamed_text_is_the_text_of_the_whole_answer(run: Run, seed: int) -> None:
    args = ("generate", "hello", "--max-new-tokens", 40, "--temperature", 1.5, "--seed", seed)
    text = record(run(*args, "--json"))["text"]
    assert run(*args).stdout == (text if text.endswith("\n") else text + "\n")


@pytest.mark.parametrize("length", [3, 6, 9, 14, 60])
def test_characters_that_span_tokens_are_streamed_whole(run: Run, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    tokens = scripted(monkeypatch, "A😀é 你好，世界 👩‍👩‍👧!")[:length]
    pieces: list[str] = []
    monkeypatch.setattr(common.screen, "write", pieces.append)
    run("generate", "hello", "--temperature", 1, "--max-new-tokens", length)
    whole = byte_tokenizer().decode(tokens)
    assert "".join(pieces) == whole
    assert all("\ufffd" not in piece for piece in pieces[:-1])


def test_a_stop_text_is_neither_printed_nor_followed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, "one two three four")
    result = run("generate", "hello", "--temperature", 1, "--stop", "four", "--stop", "three")
    assert result.stdout == "one two \n"
    assert "finish reason stop" in result.stderr


def test_dash_reads_the_prompt_from_standard_input(run: Run) -> None:
    for args in (["-"], []):
        piped = record(run("generate", *args, "--json", "--max-new-tokens", 8, input="héllo\n"))
        assert piped["token_ids"] == record(run("generate", "héllo", "--json", "--max-new-tokens", 8))["token_ids"]


def test_compare_decodes_plainly_from_the_same_seed(run: Run) -> None:
    args = ("generate", "hello", "--max-new-tokens", 20, "--temperature", 1, "--compare")
    result = run(*args)
    lines = [line.split() for line in result.stderr.splitlines() if line.strip()]
    assert ["method", "tokens", "tokens/s", "tau", "rounds", "speedup", "identical"] in lines
    assert [line[0] for line in lines if line[-1] in ("-", "yes")] == ["ar", "lookuptree"]
    assert "method" not in result.stdout
    compared = record(run(*args, "--json"))["compare"]
    assert compared["method"] == "ar" and compared["identical"] is True and compared["speedup"] > 0


def test_without_a_seed_a_fresh_one_is_reported_and_repeats_the_answer(run: Run) -> None:
    args = ("generate", "hello", "--max-new-tokens", 20, "--temperature", 1, "--json")
    first = record(run(*args))
    assert record(run(*args, "--seed", first["seed"]))["token_ids"] == first["token_ids"]
    assert record(run(*args))["seed"] != first["seed"]


def test_the_seed_is_shown_when_it_mattered(run: Run) -> None:
    sampled = run("generate", "hello", "--max-new-tokens", 4, "--temperature", 1, "--seed", 7)
    assert "seed 7" in sampled.stderr
    assert "seed" not in run("generate", "hello", "--max-new-tokens", 4, "--seed", 7).stderr


def test_a_drafter_that_is_never_right_is_said_to_be(run: Run) -> None:
    result = run("generate", "hello", "--max-new-tokens", 80, "--ignore-eos", "--budget", 3, "--method", "dominotree")
    notes = [line for line in result.stderr.splitlines() if line.startswith("Note: ")]
    assert len(notes) == 1 and "hardly ever right" in notes[0]


def test_a_method_whose_own_drafter_is_missing_says_what_it_runs_on(run: Run) -> None:
    result = run("generate", "hello", "--max-new-tokens", 4, "--method", "ddtree")
    assert result.stderr.startswith("Note: ddtree runs on the Domino drafter")


def test_without_a_drafter_decoding_is_plain_and_says_so(bare: Run, model: Path) -> None:
    args = ("generate", "hello", "--target", model, "--max-new-tokens", 4)
    assert bare(*args).stderr.startswith("Note: no drafter is at hand")
    assert record(bare(*args, "--json"))["method"] == "ar"
    asked = bare(*args, "--drafter", "none")
    assert "Note" not in asked.stderr and asked.exit_code == 0
    looked = record(bare(*args, "--method", "lookup", "--compare", "--json"))
    assert (looked["method"], looked["compare"]["identical"]) == ("lookup", True)


def test_the_drafter_that_is_named_is_the_one_that_drafts(run: Run, bare: Run, dflash_drafter: Path) -> None:
    plain = run("generate", "hello", "--method", "ddtree", "--dflash-drafter", dflash_drafter, "--max-new-tokens", 4)
    assert plain.exit_code == 0 and "Note" not in plain.stderr


@pytest.fixture
def wired(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What reaches the library: arguments of `load` and of `Pair.stream`."""
    seen: dict[str, Any] = {}
    import dominotree.pair

    real = dominotree.pair.load

    def load(**arguments: Any) -> Pair:
        seen.update(arguments)
        return real(**{**arguments, "device": "cpu", "dtype": "float32", "exact": None})

    def stream(self: Pair, prompt: str, **options: Any) -> None:
        sampling = options.pop("sampling")
        seen.update(options, prompt=prompt)
        seen.update({name: getattr(sampling, name) for name in SamplingParams.__dataclass_fields__})
        raise KeyboardInterrupt

    monkeypatch.setattr(dominotree.pair, "load", load)
    monkeypatch.setattr(Pair, "stream", stream)
    return seen


@pytest.mark.parametrize(
    ("args", "name", "value"),
    [
        (["--budget", "0"], "budget", 0),
        (["--candidates", "0"], "candidates", 0),
        (["--node-topk", "3"], "node_topk", 3),
        (["--noise-aware", "--temperature", "1"], "noise_aware", True),
        (["--method", "static"], "method", "static"),
        (["--temperature", "0.5"], "temperature", 0.5),
        (["--top-p", "0.9", "--temperature", "1"], "top_p", 0.9),
        (["--top-k", "5", "--temperature", "1"], "top_k", 5),
        (["--min-p", "0.1", "--temperature", "1"], "min_p", 0.1),
        (["--repetition-penalty", "1.2"], "repetition_penalty", 1.2),
        (["--presence-penalty", "0.3"], "presence_penalty", 0.3),
        (["--frequency-penalty", "-0.3"], "frequency_penalty", -0.3),
        (["--logit-bias", "4=-100", "--logit-bias", "5=1.5"], "logit_bias", {4: -100.0, 5: 1.5}),
        (["--stop", "a", "--stop", "b"], "stop", ("a", "b")),
        (["--ignore-eos"], "ignore_eos", True),
        (["--seed", "0"], "seed", 0),
        (["--max-new-tokens", "3"], "max_new_tokens", 3),
        (["--context", "50"], "context", 50),
        (["--system", "be brief"], "system", "be brief"),
        (["--raw"], "raw", True),
        (["--dtype", "bfloat16"], "dtype", "bfloat16"),
        (["--device", "cuda"], "device", "cuda"),
        (["--threads", "1"], "threads", 1),
        (["--exact"], "exact", True),
        (["--no-exact"], "exact", False),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_every_flag_reaches_the_library(
    run: Run, wired: dict[str, Any], args: list[str], name: str, value: object
) -> None:
    assert run("generate", "hello", *args).exit_code == 130
    assert wired[name] == value


def test_flags_that_are_not_given_leave_the_defaults_to_the_library(run: Run, wired: dict[str, Any]) -> None:
    run("generate", "hello")
    assert not {"budget", "candidates", "node_topk", "raw", "system"} & wired.keys()
    defaults = SamplingParams()
    assert all(wired[name] == getattr(defaults, name) for name in SamplingParams.__dataclass_fields__ if name != "stop")


def test_the_help_names_the_defaults_that_are_in_force(bare: Run) -> None:
    text = " ".join(bare("generate", "--help").stdout.split())
    on_cpu = f"on a CPU {CPU_BUDGET}, in fp32 {FP32_CPU_BUDGET}, with AVX2 alone {AVX2_BUDGET}"
    budgets = f"{DEFAULT_BUDGET}; {on_cpu}; {DEFAULT_CAP} for methods that choose"
    assert f"without the root. [default: {budgets}]" in text
    assert f"0: all. [default: {DEFAULT_CANDIDATES}]" in text
    assert f"Most tokens of an answer. [default: {SamplingParams().max_new_tokens}]" in text
    assert generate.__doc__ is not None and generate.__doc__.split(".")[0] in text


@pytest.mark.pair
def test_the_real_pair_answers_and_is_identical_to_plain_decoding(bare: Run) -> None:
    args = ("generate", "Name three colours of the rainbow.", "--max-new-tokens", 24, "--compare", "--json")
    found = record(bare(*args))
    assert found["text"].strip() and found["method"] == "lookuptree"
    assert found["compare"]["identical"] is True
    assert found["compare"]["new_tokens"] == found["new_tokens"]
