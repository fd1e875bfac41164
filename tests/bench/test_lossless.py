"""A difference from plain decoding is told, placed, measured and classed."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from dominotree.bench.lossless import Difference, common_length, decision_scores, first_difference
from dominotree.errors import InvalidRequest
from dominotree.methods import Drafting
from dominotree.pair import Output, Pair
from dominotree.sampling import Sampler, SamplingParams
from oracle import tiny_drafter
from targets.tiny import tiny_target

PROMPT = [5, 9, 33, 2, 61]


def make_pair(*, exact: bool | None, dtype: torch.dtype = torch.float32, scale: float = 3.0) -> Pair:
    target = tiny_target("llama", exact=exact, dtype=dtype, scale=scale)
    return Pair(target, None, tiny_drafter(target), context=256)


@pytest.fixture(scope="module")
def rounding() -> Pair:
    """A pair whose forward rounds by the number of rows."""
    pair = make_pair(exact=False)
    assert not pair.target.row_invariant
    return pair


@pytest.fixture(scope="module")
def exact() -> Pair:
    pair = make_pair(exact=True)
    assert pair.target.row_invariant
    return pair


def answers(pair: Pair, sampling: SamplingParams, prompt: list[int] = PROMPT) -> tuple[Output, Output]:
    plain = pair.generate(prompt, method="ar", sampling=sampling)
    return plain, pair.generate(prompt, method="dominotree", budget=8, sampling=sampling)


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 24, "ignore_eos": True, "seed": 3, **changes})


def spoiled(output: Output, position: int, token: int) -> Output:
    """The output with another token from `position` on."""
    kept = output.token_ids[:position]
    return replace(output, token_ids=[*kept, token, *output.token_ids[position + 1 :]])


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_equal_answers_have_no_difference(rounding: Pair, temperature: float) -> None:
    plain, tree = answers(rounding, params(temperature=temperature))
    assert first_difference(rounding, PROMPT, plain, tree, params(temperature=temperature)) is None


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("position", [0, 7, 23])
def test_a_forged_token_is_a_bug_placed_and_measured(rounding: Pair, temperature: float, position: int) -> None:
    sampling = params(temperature=temperature)
    plain, tree = answers(rounding, sampling)
    wrong = (plain.token_ids[position] + 40) % 90 + 2
    found = first_difference(rounding, PROMPT, plain, spoiled(tree, position, wrong), sampling)
    assert found is not None
    assert (found.position, found.plain_token, found.other_token) == (position, plain.token_ids[position], wrong)
    assert found.kind == "BUG"
    assert found.margin is not None and found.gap is not None and found.logit_difference is not None
    assert found.gap >= found.margin > 0
    assert found.logit_difference < 1e-3


def test_where_the_forward_is_row_invariant_even_a_runner_up_is_a_bug(exact: Pair) -> None:
    plain, tree = answers(exact, params())
    found = first_difference(exact, PROMPT, plain, spoiled(tree, 4, plain.token_ids[4] ^ 1), params())
    assert found is not None
    assert (found.kind, found.logit_difference) == ("BUG", 0.0)
    assert "row-invariant" in found.reason


def near_ties(pair: Pair, sampling: SamplingParams) -> list[tuple[list[int], Output, int, int]]:
    """Places where plain decoding's best two tokens are as good as equal: prompt, answer, position, runner-up."""
    rng, found = random.Random(1), []
    for _ in range(12):
        prompt = rng.choices(range(2, 96), k=12)
        rows: list[torch.Tensor] = []

        def look(tokens: Any, logits: torch.Tensor, rows: list[torch.Tensor] = rows) -> torch.Tensor:
            rows.append(logits.float().clone())
            return logits

        plain = pair.generate(prompt, method="ar", sampling=replace(sampling, logits_processors=(look,)))
        for position, row in enumerate(rows):
            sampler = Sampler(sampling, prompt, len(row))
            best = decision_scores(sampler, row, plain.token_ids[:position]).topk(2)
            assert int(best.indices[0]) == plain.token_ids[position] or float(best.values.diff()) == 0
            if float(-best.values.diff()) < 1e-3:
                other = next(t for t in best.indices.tolist() if t != plain.token_ids[position])
                found.append((prompt, plain, position, other))
    return found


def test_a_forged_near_tie_is_a_tie_within_the_rounding_measured_there() -> None:
    pair = make_pair(exact=False, dtype=torch.bfloat16, scale=1.5)
    places = near_ties(pair, params())
    assert places, "bf16 logits are coarse, so equal ones occur"
    for prompt, plain, position, other in places[:3]:
        forged = replace(spoiled(plain, position, other), method="dominotree", budget=8)
        found = first_difference(pair, prompt, plain, forged, params())
        assert found is not None
        assert found.logit_difference is not None and found.margin is not None
        assert found.kind == "tie", found
        assert found.margin <= 2 * found.logit_difference or found.margin == 0


def test_a_token_far_below_a_near_tie_is_still_a_bug() -> None:
    """The margin there is tiny, but the token that came out is neither of the two."""
    pair = make_pair(exact=False, dtype=torch.bfloat16, scale=1.5)
    prompt, plain, position, _ = near_ties(pair, params())[0]
    rows = [torch.zeros(96)]

    def look(tokens: Any, logits: torch.Tensor) -> torch.Tensor:
        rows.append(logits.float().clone())
        return logits

    length = params(max_new_tokens=position + 1, logits_processors=(look,))
    pair.generate(prompt, method="ar", sampling=length)
    worst = int(rows[-1].argmin())
    forged = replace(spoiled(plain, position, worst), method="dominotree", budget=8)
    found = first_difference(pair, prompt, plain, forged, params())
    assert found is not None
    assert found.kind == "BUG"
    assert found.margin is not None and found.gap is not None
    assert found.margin < 0.01 < found.gap


def test_a_forward_that_is_wrong_is_no_excuse_for_what_follows_from_it(
    rounding: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken attention moves logits far enough to explain any token; the independent pass tells it from rounding."""
    plain, _ = answers(rounding, params())
    target = rounding.target
    honest = target.forward

    def broken(cache: Any, segments: Any, **options: Any) -> Any:
        out = honest(cache, segments, **options)
        return replace(out, logits=out.logits.roll(1, dims=-1), best=()) if segments[0].parents else out

    monkeypatch.setattr(target, "forward", broken)
    tree = rounding.generate(PROMPT, method="dominotree", budget=8, sampling=params())
    assert tree.token_ids != plain.token_ids
    found = first_difference(rounding, PROMPT, plain, tree, params())
    assert found is not None
    assert found.kind == "BUG"
    assert found.logit_difference is not None and found.rounding is not None
    assert found.logit_difference > 0.1 > found.rounding
    assert "far more than" in found.reason


def test_an_answer_that_ends_early_or_late_is_a_bug(rounding: Pair) -> None:
    plain, tree = answers(rounding, params())
    short = replace(tree, token_ids=tree.token_ids[:5])
    found = first_difference(rounding, PROMPT, plain, short, params())
    assert found == Difference(5, plain.token_ids[5], None, "BUG", "dominotree ended too early")
    late = first_difference(rounding, PROMPT, replace(plain, token_ids=plain.token_ids[:5]), tree, params())
    assert late is not None
    assert (late.position, late.plain_token, late.other_token, late.kind) == (5, None, tree.token_ids[5], "BUG")


def test_equal_tokens_that_ended_for_different_reasons_are_a_bug(rounding: Pair) -> None:
    plain, tree = answers(rounding, params())
    found = first_difference(rounding, PROMPT, plain, replace(tree, finish_reason="stop"), params())
    assert found is not None
    assert (found.position, found.kind) == (24, "BUG")


def test_sampled_answers_of_different_seeds_cannot_be_compared(rounding: Pair) -> None:
    plain, tree = answers(rounding, params(temperature=1.0))
    with pytest.raises(InvalidRequest, match="seeds 3 and 4"):
        first_difference(rounding, PROMPT, plain, replace(tree, seed=4), params(temperature=1.0))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.2},
        {"temperature": 0.8, "top_k": 5},
        {"temperature": 0.8, "top_p": 0.7, "min_p": 0.05},
        {"repetition_penalty": 1.4, "frequency_penalty": 0.3},
        {"temperature": 0.7, "presence_penalty": 0.4, "logit_bias": {7: 3.0}},
    ],
)
def test_the_scores_of_a_decision_are_those_the_sampler_decides_on(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    sampler = Sampler(SamplingParams(seed=9, **options), PROMPT, 96)
    for step in range(40):
        row, path = 2 * torch.randn(96), [7, 8, 9][: step % 4]
        assert int(decision_scores(sampler, row, path).argmax()) == sampler.choose(row, path)


def test_a_token_that_was_cut_is_infinitely_far_and_written_as_null(rounding: Pair) -> None:
    sampling = params(temperature=1.0, top_k=1)
    plain, tree = answers(rounding, sampling)
    found = first_difference(rounding, PROMPT, plain, spoiled(tree, 2, plain.token_ids[2] ^ 1), sampling)
    assert found is not None
    assert (found.kind, found.gap) == ("BUG", math.inf)
    assert found.to_json()["gap"] is None


def test_more_than_method_and_budget_can_be_said_about_how_it_was_decoded(rounding: Pair) -> None:
    sampling = params()
    plain, _ = answers(rounding, sampling)
    drafting = Drafting("dominotree", 5, 3, 2)
    narrow = rounding.generate(PROMPT, sampling=sampling, method="dominotree", budget=5, candidates=3, node_topk=2)
    wrong = spoiled(narrow, 3, plain.token_ids[3] ^ 1)
    found = first_difference(rounding, PROMPT, plain, wrong, sampling, drafting=drafting)
    assert found is not None
    assert found.position == 3


def test_common_length() -> None:
    assert common_length([1, 2, 3], [1, 2, 4]) == 2
    assert common_length([1, 2], [1, 2, 4]) == 2
    assert common_length([], [1]) == 0
