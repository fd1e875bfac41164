"""Mode tree against plain vLLM, token for token, on tiny models whose drafter knows the answers more or less."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM; `make test-vllm` runs this in an environment of its own")

from engines.vllm.host import (
    Oracle,
    accepted,
    answers,
    engine,
    generate,
    metric,
    random_prompts,
    write_drafter,
    write_target,
)

PROMPTS = random_prompts(8)


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    with pytest.MonkeyPatch.context() as patch:
        told = Oracle()
        told.install(patch)
        yield told


@pytest.fixture(scope="module")
def plain(target: Path) -> Iterator[Any]:
    with engine(target) as llm:
        yield llm


@pytest.fixture(scope="module")
def drafting(target: Path, drafter: Path, oracle: Oracle) -> Iterator[Any]:
    with engine(target, drafter) as llm:
        yield llm


class Compare:
    """Answers of both engines, once the oracle was told what plain vLLM says."""

    def __init__(self, plain: Any, oracle: Oracle) -> None:
        self.plain, self.oracle = plain, oracle

    def __call__(self, drafting: Any, prompts: Sequence[Sequence[int]] = PROMPTS, **sampling: Any) -> None:
        """Asserts that they are equal together and one by one, and that trees had a part in it."""
        expected = [answers(self.plain, [prompt], **sampling)[0] for prompt in prompts]
        self.oracle.scripts = [[*p, *a] for p, a in zip(prompts, expected, strict=True)]
        together = generate(drafting, prompts, **sampling)
        alone = [generate(drafting, [prompt], **sampling)[0] for prompt in prompts]
        for outputs in (together, alone):
            assert [list(output.outputs[0].token_ids) for output in outputs] == expected
            kept = accepted(outputs)
            assert sum(kept) > len(kept), "the oracle was not heard"


@pytest.fixture
def compare(plain: Any, oracle: Oracle) -> Compare:
    return Compare(plain, oracle)


def test_greedy_answers_are_those_of_plain_vllm(compare: Compare, drafting: Any) -> None:
    compare(drafting)
    compare(drafting, max_tokens=1 + 24)


SAMPLING: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "filters": {"temperature": 1.0, "top_p": 0.9, "top_k": 20},
    "penalties": {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "greedy penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "min tokens": {"temperature": 0.8, "min_tokens": 9, "stop_token_ids": list(range(4, 60))},
    "allowed tokens": {"temperature": 1.0, "allowed_token_ids": list(range(5, 40))},
    "stop tokens": {"temperature": 0.8, "stop_token_ids": list(range(4, 14))},
}


@pytest.mark.parametrize("name", SAMPLING)
def test_a_seed_gives_the_tokens_of_plain_vllm(compare: Compare, drafting: Any, name: str) -> None:
    compare(drafting, **{"seed": 7, **SAMPLING[name]})


def test_greedy_and_sampled_requests_share_a_batch(plain: Any, drafting: Any, oracle: Oracle) -> None:
    from vllm import SamplingParams

    params = [
        SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=10 + i, detokenize=False)
        for i in range(len(PROMPTS))
    ]

    def together(llm: Any) -> list[list[int]]:
        outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    expected = together(plain)
    oracle.scripts = [[*p, *a] for p, a in zip(PROMPTS, expected, strict=True)]
    assert together(drafting) == expected


def test_logprobs_are_those_of_plain_vllm(plain: Any, drafting: Any, oracle: Oracle) -> None:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.8, seed=3, max_tokens=16, logprobs=4, prompt_logprobs=2, detokenize=False)

    def given(llm: Any) -> list[Any]:
        return list(llm.generate([{"prompt_token_ids": p} for p in PROMPTS[:3]], params, use_tqdm=False))

    expected = given(plain)
    oracle.scripts = [[*p, *e.outputs[0].token_ids] for p, e in zip(PROMPTS, expected, strict=False)]
    for one, other in zip(given(drafting), expected, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        for row, same in zip(logprob_rows(one), logprob_rows(other), strict=True):
            assert {token: entry.rank for token, entry in row.items()} == {t: e.rank for t, e in same.items()}
            assert [e.logprob for e in row.values()] == pytest.approx([e.logprob for e in same.values()], abs=1e-4)


def logprob_rows(output: Any) -> list[dict[int, Any]]:
    """The logprobs of prompt and answer; the prompt's first token has none."""
    return [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]


def test_prompts_in_chunks_and_preempted_requests(target: Path, drafter: Path, compare: Compare) -> None:
    prompts = [*random_prompts(4, longest=60), *random_prompts(3, longest=120)]
    tight = {"num_gpu_blocks_override": 12, "max_num_batched_tokens": 40, "enable_prefix_caching": False}
    with engine(target, drafter, **tight) as llm:
        compare(llm, prompts, max_tokens=60)
        compare(llm, prompts, max_tokens=60, temperature=0.8, seed=5)
        assert metric(llm, "num_preemptions") > 2


def test_cached_prefixes_bring_the_drafters_context_along(target: Path, drafter: Path, compare: Compare) -> None:
    shared = random_prompts(1, longest=120)[0] + [5] * 80
    prompts = [[*shared, *own] for own in random_prompts(4)]
    with engine(target, drafter, num_gpu_blocks_override=13, max_num_batched_tokens=40) as llm:
        compare(llm, prompts, max_tokens=60)
        assert metric(llm, "prefix_cache_hits") > 4 * 64
        assert metric(llm, "num_preemptions") > 0


def test_an_aborted_request_leaves_the_others_alone(plain: Any, drafting: Any, oracle: Oracle) -> None:
    from vllm import SamplingParams

    expected = answers(plain, PROMPTS)
    oracle.scripts = [[*p, *a] for p, a in zip(PROMPTS, expected, strict=True)]
    inner = drafting.llm_engine
    for i, prompt in enumerate(PROMPTS):
        inner.add_request(
            f"r{i}", {"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=24, detokenize=False)
        )
    found: dict[str, list[int]] = {}
    steps = 0
    while inner.has_unfinished_requests():
        for output in inner.step():
            found[output.request_id] = list(output.outputs[0].token_ids)
        steps += 1
        if steps == 3:
            inner.abort_request(["r2", "r5"])
    assert steps < 20
    assert [found[f"r{i}"] for i in (0, 1, 3, 4, 6, 7)] == [expected[i] for i in (0, 1, 3, 4, 6, 7)]


def test_answers_up_to_the_longest_context(target: Path, drafter: Path, compare: Compare) -> None:
    prompts = [[*p, *([7] * (230 - len(p)))] for p in PROMPTS[:3]]
    with engine(target, drafter, budget=20) as llm:
        compare(llm, [*prompts, PROMPTS[3]], max_tokens=100)


def test_without_a_seed_tokens_follow_the_models_distribution(plain: Any, drafting: Any, oracle: Oracle) -> None:
    """Second and third tokens, which trees decide about, counted over many answers of both engines."""
    prompt, samples = PROMPTS[1], 600
    flat = {"temperature": 0.5, "top_k": 3, "max_tokens": 5}
    oracle.scripts = [[*prompt, *answers(plain, [prompt])[0]]]
    sampled = [generate(llm, [prompt] * samples, **flat) for llm in (plain, drafting)]
    kept = accepted(sampled[1])
    assert sum(kept) > 0.5 * len(kept)
    counts = [Counter(tuple(output.outputs[0].token_ids[1:3]) for output in outputs) for outputs in sampled]
    common = [pair for pair in counts[0] | counts[1] if counts[0][pair] + counts[1][pair] >= 10]
    cells = [[count[pair] for pair in common] for count in counts]
    cells = [[*row, samples - sum(row)] for row in cells]
    assert len(common) >= 5
    distance = sum((a - b) ** 2 / (a + b) for a, b in zip(*cells, strict=True) if a + b)
    assert distance < len(common) + 4 * (2 * len(common)) ** 0.5  # chi-squared, four standard deviations


@pytest.mark.parametrize(
    ("variant", "sizes", "kind"),
    [("qwen3-tied", {"head_dim": 32}, {}), ("qwen2", {}, {"projector": None, "layer_ids": (1, 3)})],
)
def test_other_families_and_drafters(
    tmp_path: Path, oracle: Oracle, variant: str, sizes: dict[str, Any], kind: dict[str, Any]
) -> None:
    target, drafter = write_target(tmp_path / "target", variant, **sizes), write_drafter(tmp_path / "drafter", **kind)
    with engine(target) as plain, engine(target, drafter) as llm:
        Compare(plain, oracle)(llm, PROMPTS[:4])


def test_what_the_text_says_is_proposed_as_well(plain: Any, drafting: Any, oracle: Oracle) -> None:
    """A drafter that knows nothing, and answers that go in circles: paths deeper than a draft are accepted."""
    oracle.scripts = []
    expected = answers(plain, PROMPTS, max_tokens=150)
    outputs = generate(drafting, PROMPTS, max_tokens=150)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert max(accepted(outputs)) == 8


@pytest.mark.slow
def test_compiled_models(target: Path, drafter: Path, compare: Compare) -> None:
    with engine(target, drafter, enforce_eager=False) as llm:
        compare(llm)
