"""Tokens follow the target's distribution, and the same seed gives the same token everywhere."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dominotree.decode import Decoder
from dominotree.errors import InvalidRequest, NumericalError
from dominotree.generation import Request
from dominotree.methods import Drafting
from dominotree.sampling import Sampler, SamplingParams, gumbel_noise
from dominotree.targets.rows import Segment
from oracle import OracleDrafter, tiny_drafter
from targets.tiny import tiny_target


def fits(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """p-value of a chi-square test, rare outcomes pooled."""
    expected = probabilities * counts.sum()
    assert counts[probabilities == 0].sum() == 0
    common = expected >= 8
    rest = ~common & (probabilities > 0)
    seen, hoped = list(counts[common]), list(expected[common])
    if rest.any() and expected[rest].sum() > 0:
        seen.append(counts[rest].sum())
        hoped.append(expected[rest].sum())
    hoped = np.array(hoped) * (sum(seen) / sum(hoped))
    return float(scipy_stats.chisquare(seen, hoped).pvalue) if len(seen) > 1 else 1.0


def test_gumbel_noise_is_gumbel_and_independent_across_keys() -> None:
    ids = torch.arange(200_000)
    noise = gumbel_noise(7, 3, ids).numpy()
    assert scipy_stats.kstest(noise, scipy_stats.gumbel_r.cdf).pvalue > 1e-3
    for other in (
        gumbel_noise(8, 3, ids),
        gumbel_noise(7, 4, ids),
        gumbel_noise(-1, 3, ids),
        gumbel_noise(2**64 - 1, 3, ids + 1),
    ):
        assert abs(np.corrcoef(noise, other.numpy())[0, 1]) < 0.01
    across = torch.cat([gumbel_noise(1, p, torch.arange(5)) for p in range(40_000)]).numpy()
    assert scipy_stats.kstest(across, scipy_stats.gumbel_r.cdf).pvalue > 1e-3


def test_a_seed_means_the_same_draws_from_one_version_to_the_next() -> None:
    """Who wrote a seed down wants the same answer again: other values here change every seeded one."""
    drawn = gumbel_noise(7, 42, torch.tensor([0, 1, 49151]))
    assert drawn.tolist() == pytest.approx([0.346276793045, 1.281801890300, 0.767387319053], abs=1e-9)


def test_gumbel_noise_depends_on_its_key_only() -> None:
    whole = gumbel_noise(11, 5, torch.arange(1000))
    picked = torch.tensor([3, 999, 500])
    assert torch.equal(gumbel_noise(11, 5, picked), whole[picked])
    state = torch.random.get_rng_state()
    gumbel_noise(11, 5, torch.arange(1000))
    assert torch.equal(state, torch.random.get_rng_state())


TRANSFORMS: list[dict[str, Any]] = [
    {"temperature": 0.5},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.5, "top_p": 0.7},
    {"temperature": 0.8, "min_p": 0.1},
    {"temperature": 1.2, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_draws_follow_the_transformed_distribution(transform: dict[str, Any]) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1)) * 2
    warpers = [TemperatureLogitsWarper(transform["temperature"])]
    warpers += [TopKLogitsWarper(transform["top_k"])] if "top_k" in transform else []
    warpers += [TopPLogitsWarper(transform["top_p"])] if "top_p" in transform else []
    warpers += [MinPLogitsWarper(transform["min_p"])] if "min_p" in transform else []
    scores = logits[None]
    for warper in warpers:
        scores = warper(torch.zeros(1, 1, dtype=torch.int64), scores)
    probabilities = scores[0].softmax(-1).double().numpy()
    counts = np.zeros(40)
    for seed in range(20_000):
        counts[Sampler(SamplingParams(seed=seed, **transform), [1, 2], 40).choose(logits, [])] += 1
    assert fits(counts, probabilities / probabilities.sum()) > 1e-4


def test_penalties_and_bias_apply_in_the_stated_order() -> None:
    logits = torch.tensor([2.0, -1.0, 3.0, 0.5, 0.0])
    seen: list[list[int]] = []

    def processor(ids: Any, row: torch.Tensor) -> torch.Tensor:
        seen.append(list(ids))
        row[4] = 1.0
        return row

    params = SamplingParams(
        repetition_penalty=2.0,
        presence_penalty=0.25,
        frequency_penalty=0.5,
        logit_bias={0: 1.0, 4: 0.5},
        logits_processors=(processor,),
    )
    got = Sampler(params, [0, 1], 5)._transform(logits.clone(), [2, 2])
    # bias 2+1=3, then /2; -1*2; (3/2) - .25 - 2*.5; untouched; 1+.5
    torch.testing.assert_close(got, torch.tensor([1.5, -2.0, 0.25, 0.5, 1.5]))
    assert seen == [[0, 1, 2, 2]]
    hugging = RepetitionPenaltyLogitsProcessor(2.0)(torch.tensor([[0, 1, 2]]), logits[None].clone())[0]
    own = Sampler(SamplingParams(repetition_penalty=2.0), [0, 1], 5)._transform(logits.clone(), [2])
    torch.testing.assert_close(own, hugging)
    small = torch.tensor([0.5, 0.0, -0.5, 1.0, 9.0])
    own = Sampler(SamplingParams(repetition_penalty=2.0), [0, 1], 5)._transform(small, [2, 3])
    torch.testing.assert_close(own, torch.tensor([0.25, 0.0, -1.0, 0.5, 9.0]))


@pytest.mark.parametrize(("name", "expected"), [("presence_penalty", 1.5), ("frequency_penalty", 0.5)])
def test_a_penalty_alone_counts_what_was_answered_and_not_the_prompt(name: str, expected: float) -> None:
    sampler = Sampler(SamplingParams(**{name: 0.5}), [0, 0], 3)
    got = sampler._transform(torch.tensor([2.0, 2.0, 2.0]), [1, 1, 1])
    torch.testing.assert_close(got, torch.tensor([2.0, expected, 2.0]))


def test_a_decision_is_over_the_transformed_logits() -> None:
    logits, bias = torch.tensor([1.0, 3.0, 2.0]), SamplingParams(logit_bias={1: -5.0, 2: 0.5}, presence_penalty=1.0)
    sums, ids = Sampler(bias, [0], 3).decision(logits, [2])
    torch.testing.assert_close(sums, torch.tensor([1.0, -2.0, 1.5]))
    assert ids is None and logits.tolist() == [1.0, 3.0, 2.0]


@pytest.mark.parametrize(("name", "value", "said"), [("top_k", 1.5, "an integer"), ("temperature", "warm", "a number")])
def test_a_message_says_what_kind_of_number_is_meant(name: str, value: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name}.*{said} "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("returned", "said"), [(None, "NoneType"), (torch.zeros(2, 3), r"\[2, 3\]"), ([1.0, 2.0, 3.0], "list")]
)
def test_a_processor_that_returns_something_else_is_told_what_it_returned(returned: Any, said: str) -> None:
    sampler = Sampler(SamplingParams(logits_processors=(lambda _, __: returned,)), [0], 3)
    with pytest.raises(InvalidRequest, match=rf"returned {said}; logits of shape \[3\] are expected"):
        sampler.decision(torch.zeros(3), [])


@pytest.mark.parametrize("drafting", [Drafting("ar"), Drafting("dominotree", 8), Drafting("domino")])
@pytest.mark.parametrize("good", [True, False])
def test_committed_tokens_follow_the_targets_distribution(drafting: Drafting, good: bool) -> None:
    """The first three tokens of many seeds, the token after a rejection included."""
    target = tiny_target("llama", vocab_size=12, scale=2.0)
    prompt, runs = [3, 5, 7], 700
    drafter = tiny_drafter(target, draft_vocab=None, mask_token=1)
    counts = [np.zeros(12), np.zeros((12, 12))]
    rejected = np.zeros((12, 12))
    for seed in range(runs):
        params = SamplingParams(temperature=1.2, top_p=0.95, seed=seed, max_new_tokens=3, ignore_eos=True)
        if good:
            script = [*prompt, *random.Random(seed).choices(range(12), k=4)]
            drafter = OracleDrafter(target, [script], mask_token=1) if seed == 0 else drafter
            drafter.scripts = [script]  # type: ignore[attr-defined]
        generation = Decoder(target, drafter, context=32, max_nodes=16).run([Request(prompt, params, drafting)])[0]
        first, second, _ = generation.new_tokens
        counts[0][first] += 1
        counts[1][first, second] += 1
        if generation.stats.accepted[0] == 1:
            rejected[first, second] += 1

    def distribution(tokens: list[int]) -> np.ndarray:
        logits = target.forward(target.new_cache(1, 32), [Segment(0, 0, tokens)]).logits[-1:]
        scores = TopPLogitsWarper(0.95)(torch.zeros(1, 1, dtype=torch.int64), logits / 1.2)
        return scores[0].softmax(-1).double().numpy()

    first = distribution(prompt)
    assert fits(counts[0], first / first.sum()) > 1e-4
    joint = np.stack([first[t] * distribution([*prompt, t]) for t in range(12)])
    assert fits(counts[1].ravel(), joint.ravel() / joint.sum()) > 1e-4
    if drafting.method != "ar":
        assert rejected.sum() > 25


@given(
    st.sampled_from(["temperature", "top_p", "top_k", "min_p", "seed", "max_new_tokens", "logprobs"]),
    st.sampled_from([-1, math.nan, "x", True, 1e300, None]),
)
@settings(deadline=None, max_examples=60)
def test_options_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    if (value is None and name in ("seed", "logprobs")) or (name == "seed" and value == -1):
        SamplingParams(**{name: value})
        return
    with pytest.raises(InvalidRequest, match=name):
        SamplingParams(**{name: value})


def test_transforms_that_leave_no_token_say_so() -> None:
    params = SamplingParams(logit_bias=dict.fromkeys(range(4), -math.inf))
    for temperature in (0.0, 1.0):
        with pytest.raises(InvalidRequest, match="no token"):
            Sampler(SamplingParams(logit_bias=params.logit_bias, temperature=temperature), [1], 4).choose(
                torch.zeros(4), []
            )


def test_a_banned_token_is_never_drawn_and_extreme_temperatures_work() -> None:
    logits = torch.tensor([50.0, 49.0, -200.0])
    for seed in range(200):
        assert (
            Sampler(SamplingParams(temperature=1.0, logit_bias={0: -math.inf}, seed=seed), [1], 3).choose(logits, [])
            != 0
        )
        assert Sampler(SamplingParams(temperature=1e-9, seed=seed), [1], 3).choose(logits, []) == 0
    drawn = {Sampler(SamplingParams(temperature=1e6, seed=seed), [1], 3).choose(logits, []) for seed in range(50)}
    assert drawn == {0, 1, 2}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**63),
    temperature=st.sampled_from([1e-3, 0.1, 0.7, 1.0, 5.0, 1e4]),
    vocab=st.sampled_from([1, 7, 513, 20_000]),
    bf16=st.booleans(),
)
def test_the_kernel_draws_what_the_sums_say(seed: int, temperature: float, vocab: int, bf16: bool) -> None:
    logits = 4 * torch.randn(vocab, generator=torch.Generator().manual_seed(seed % 1000))
    logits = logits.bfloat16() if bf16 else logits
    logits[vocab // 3] = -math.inf if vocab > 1 else 0.0
    sampler = Sampler(SamplingParams(temperature=temperature, seed=seed), [1, 2], vocab)
    sums, ids = sampler.decision(logits, [3])
    assert ids is None
    assert sampler.choose(logits, [3]) == int(sums.argmax())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_and_infinite_logits_are_drawn_from_as_the_sums_say(dtype: torch.dtype) -> None:
    sampler = Sampler(SamplingParams(temperature=1.0, seed=3), [1], 100)
    logits = torch.zeros(100, dtype=dtype)
    logits[[7, 60]] = math.inf
    assert sampler.choose(logits, []) == int(sampler.decision(logits, [])[0].argmax())
    assert sampler.choose(logits, []) in (7, 60)
    logits[20] = math.nan
    with pytest.raises(NumericalError, match="NaN"):
        sampler.choose(logits, [])
    with pytest.raises(InvalidRequest, match="no token"):
        sampler.choose(torch.full((100,), -math.inf, dtype=dtype), [])


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    top_p=st.sampled_from([1e-9, 0.3, 0.9, 0.999, 1 - 1e-9]),
    vocab=st.sampled_from([1, 30, 1024, 1025, 5000]),
    spread=st.sampled_from([0.0, 0.1, 3.0]),
    quantum=st.sampled_from([0.0, 0.5]),
)
def test_top_p_keeps_the_likeliest_tokens_ties_to_the_smaller_id(
    seed: int, top_p: float, vocab: int, spread: float, quantum: float
) -> None:
    logits = spread * torch.randn(vocab, generator=torch.Generator().manual_seed(seed))
    logits = (logits / quantum).round() * quantum if quantum else logits
    sampler = Sampler(SamplingParams(temperature=1.0, top_p=top_p, seed=1), [1], vocab)
    _, ids = sampler.decision(logits, [])
    assert ids is not None
    ordered, order = logits.double().sort(descending=True, stable=True)
    mass = ordered.softmax(-1).cumsum(-1)
    assert sorted(order[: len(ids)].tolist()) == ids.tolist()
    assert len(ids) == vocab or mass[len(ids) - 1] >= top_p - 1e-12
    assert len(ids) == 1 or mass[len(ids) - 2] < top_p + 1e-12


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_a_penalty_alone_changes_what_is_chosen(name: str, temperature: float) -> None:
    def chosen(**penalty: float) -> int:
        sampler = Sampler(SamplingParams(temperature=temperature, seed=1, **penalty), [0], 3)
        return sampler.choose(torch.tensor([1.0, 2.0, 1.9]), [1])

    assert chosen() == 1 and chosen(**{name: 1.5}) == 2
    assert not SamplingParams(temperature=0.0, **{name: 1.5}).is_plain_greedy  # type: ignore[arg-type]


def test_what_a_processor_keeps_is_not_written_into() -> None:
    kept = torch.tensor([1.0, 2.0, 3.0])
    sampler = Sampler(SamplingParams(logit_bias={0: 5.0}, logits_processors=(lambda _, __: kept,)), [1], 3)
    for _ in range(2):
        assert sampler.decision(torch.zeros(3), [])[0].tolist() == [6.0, 2.0, 3.0]
    assert kept.tolist() == [1.0, 2.0, 3.0]
