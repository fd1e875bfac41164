"""The default pair inside vLLM, in fp32: against plain vLLM, and against our own engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM; `make test-vllm` runs this in an environment of its own")

import dominotree as dt
from dominotree.hub import resolve_target
from engines.vllm.host import accepted, answers, engine, generate

pytestmark = pytest.mark.pair

BUILTIN = Path(dt.__file__).parent / "bench" / "builtin"
TOKENS = 32
BUDGET = 8
METHOD = "lookuptree"


@pytest.fixture(scope="module")
def pair() -> dt.Pair:
    return dt.load(dtype="float32", progress=False)


@pytest.fixture(scope="module")
def prompts(pair: dt.Pair) -> list[list[int]]:
    files = sorted(BUILTIN.glob("*.jsonl"))
    return [pair.prompt_ids(json.loads(file.read_text().splitlines()[0])["turns"][0]) for file in files]


@pytest.fixture(scope="module")
def plain() -> Iterator[Any]:
    with engine(resolve_target("smollm2-135m"), max_model_len=1024, block_size=128) as llm:
        yield llm


@pytest.fixture(scope="module")
def drafting() -> Iterator[Any]:
    target = resolve_target("smollm2-135m")
    with engine(target, "smollm2-135m-domino", budget=BUDGET, max_model_len=1024, block_size=128) as llm:
        yield llm


def test_answers_are_those_of_plain_vllm(plain: Any, drafting: Any, prompts: list[list[int]]) -> None:
    for sampling in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 5}):
        expected = answers(plain, prompts, max_tokens=TOKENS, **sampling)
        assert answers(drafting, prompts, max_tokens=TOKENS, **sampling) == expected


def test_rounds_accept_what_our_own_engine_accepts(drafting: Any, pair: dt.Pair, prompts: list[list[int]]) -> None:
    for prompt in prompts:
        own = pair.generate(prompt, method=METHOD, budget=BUDGET, max_new_tokens=TOKENS)
        [output] = outputs = generate(drafting, [prompt], max_tokens=TOKENS)
        assert list(output.outputs[0].token_ids) == own.token_ids
        committed = [1 + kept for kept in accepted(outputs)]
        assert committed == own.stats.accepted[: len(committed)]
        assert len(committed) >= len(own.stats.accepted) - 1  # the last token alone is not drafted for


def test_cached_prefixes_accept_as_much(drafting: Any, prompts: list[list[int]]) -> None:
    long = [token for prompt in prompts * 2 for token in prompt]
    first, again = (generate(drafting, [long], max_tokens=TOKENS, ignore_eos=True) for _ in range(2))
    assert again[0].num_cached_tokens >= 128 > first[0].num_cached_tokens
    assert accepted(again) == accepted(first)
    assert sum(accepted(first)) > 3


@pytest.mark.parametrize(
    "wanted",
    [
        {"choice": ["Lisbon", "London", "Paris"]},
        {"regex": r"[A-Z][a-z]+ (is|was) [a-z ]{5,30}\."},
        {"json": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}},
    ],
)
def test_structured_answers_are_those_of_plain_vllm(
    plain: Any, drafting: Any, pair: dt.Pair, wanted: dict[str, Any]
) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    prompt = pair.prompt_ids("What is the capital of France?")
    both = [
        answers(llm, [prompt, prompt], max_tokens=TOKENS, structured_outputs=StructuredOutputsParams(**wanted))
        for llm in (plain, drafting)
    ]
    assert both[0] == both[1]
    assert len(both[0][0]) > 1


def test_bad_words_are_kept_out_as_in_plain_vllm(plain: Any, drafting: Any, prompts: list[list[int]]) -> None:
    common = [" the", " a", " to", " and", "the first", "."]
    expected = answers(plain, prompts, max_tokens=TOKENS, bad_words=common)
    assert answers(drafting, prompts, max_tokens=TOKENS, bad_words=common) == expected
    assert expected != answers(plain, prompts, max_tokens=TOKENS)
