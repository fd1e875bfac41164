"""Every method gives the tokens that plain decoding gives: at temperature 0, and with the same seed above it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from dominotree import native
from dominotree.adaptive import AdaptiveBudget
from dominotree.calibration import Calibration
from dominotree.decode import Decoder
from dominotree.generation import Generation, Request
from dominotree.methods import METHODS, Drafting
from dominotree.sampling import SamplingParams
from dominotree.targets.base import Target
from oracle import OracleDrafter, tiny_costs, tiny_drafter
from targets.tiny import VARIANTS, tiny_model, tiny_target

SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 1.0, "seed": 2, "top_k": 20},
    {"temperature": 1.3, "seed": 3, "top_p": 0.8, "min_p": 0.02},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    {
        "temperature": 0.9,
        "seed": 4,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.4,
        "logit_bias": {5: 2.0, 7: -4.0},
    },
]


def prompts(count: int, seed: int, low: int = 1, high: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(2, 96), k=rng.randint(low, high)) for _ in range(count)]


def plain(target: Target, prompt: list[int], sampling: SamplingParams) -> Generation:
    return Decoder(target, context=256).run([Request(prompt, sampling, Drafting("ar"))])[0]


def exact_target(variant: str, dtype: torch.dtype, seed: int = 0):  # type: ignore[no-untyped-def]
    if dtype == torch.int8:
        if not native.available():
            pytest.skip(f"int8 weights need the C kernels: {native.reason()}")
        return tiny_target(variant, dtype=[torch.float32, torch.bfloat16][seed % 2], int8=True, seed=seed)
    if dtype == torch.bfloat16 and not native.available():
        return tiny_target(variant, dtype=dtype, exact=True, seed=seed)
    return tiny_target(variant, dtype=dtype, seed=seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("method", [name for name in METHODS if name != "ar"])
def test_every_method_equals_plain_decoding(method: str, dtype: torch.dtype) -> None:
    rng = random.Random(method)
    accepted = []
    for trial in range(8):
        variant = rng.choice(list(VARIANTS))
        target = exact_target(variant, dtype, seed=trial)
        sampling = SamplingParams(max_new_tokens=40, ignore_eos=True, **rng.choice(SAMPLINGS))
        batch = prompts(3, trial)
        references = [plain(target, prompt, sampling).tokens for prompt in batch]
        shape = dict(shift_label=rng.random() < 0.5, prefix_len=rng.randrange(4), block=rng.choice([2, 3, 6, 9]))
        if not shape["shift_label"] or method == "ddtree":
            shape["prefix_len"] = min(shape["prefix_len"], shape["block"] - 1)
        shape["prefix_len"] = min(shape["prefix_len"], shape["block"] - (0 if shape["shift_label"] else 1))
        weights = rng.choice([(1.0, 0.0, 0.0), (0.8, 0.2, 0.0), (0.6, 0.25, 0.15), (0.2, 0.6, 0.2)])
        oracle = OracleDrafter(
            target, references, right=weights[0], sibling=weights[1], wrong=weights[2], seed=trial, **shape
        )
        vocabulary = rng.choice([{}, {"draft_vocab": 40}, {"draft_vocab": 40, "context_vocab": rng.choice([1, 5, 30])}])
        for drafter in (oracle, tiny_drafter(target, seed=trial, **vocabulary, **shape)):
            budget, width = rng.choice([0, 1, 4, 16, 40]), rng.choice([1, 8, 64, 0])
            drafting = Drafting(
                method,
                budget,
                width,
                rng.choice([None, 2]),
                noise_aware=rng.random() < 0.5,
                sampled_candidates=rng.random() < 0.2,
                reference_builder=rng.random() < 0.2,
            )
            adaptive = AdaptiveBudget(tiny_costs(rng.choice([0.0, 0.3])), Calibration.fresh(drafter.draft_length))
            decoder = Decoder(target, drafter, slots=3, context=256, max_nodes=64, adaptive=adaptive)
            together = decoder.run([Request(prompt, sampling, drafting) for prompt in batch])
            assert [g.tokens for g in together] == references, (variant, trial, sampling, drafting)
            accepted += [g.stats.mean_accepted for g in together]
            for generation in together:
                stats = generation.stats
                assert stats.new_tokens == 1 + sum(stats.accepted) == len(generation.new_tokens)
    assert max(accepted) > 1.9  # the oracle was believed, so acceptance was exercised


@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3"])
def test_plain_decoding_equals_transformers_generate(variant: str) -> None:
    model, target = tiny_model(variant), tiny_target(variant)
    for prompt in prompts(4, 11, low=2):
        expected = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), do_sample=False,
            max_new_tokens=50, pad_token_id=0,
        )[0].tolist()  # fmt: skip
        assert plain(target, prompt, SamplingParams(max_new_tokens=50)).tokens == expected


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_batch_with_mixed_requests_gives_each_its_own_answer(temperature: float) -> None:
    """Different methods, budgets, lengths and seeds in one batch, more requests than slots."""
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    rng = random.Random(3)
    requests = []
    for i, prompt in enumerate(prompts(9, 5)):
        sampling = SamplingParams(temperature=temperature, seed=i, max_new_tokens=rng.randint(1, 40), ignore_eos=True)
        method = rng.choice(list(METHODS))
        requests.append(Request(prompt, sampling, Drafting(method, rng.choice([1, 4, 16]))))
    adaptive = AdaptiveBudget(tiny_costs(), Calibration.fresh(drafter.draft_length))
    together = Decoder(target, drafter, slots=3, context=128, adaptive=adaptive).run(requests)
    for request, generation in zip(requests, together, strict=True):
        assert generation.tokens == plain(target, list(request.prompt), request.sampling).tokens


def test_the_drafters_context_equals_one_made_from_scratch() -> None:
    target = tiny_target("qwen3")
    drafter = tiny_drafter(target)
    decoder = Decoder(target, drafter, slots=2, context=200)
    seen = []
    original = drafter.draft

    def spy(cache, slots, roots, **options):  # type: ignore[no-untyped-def]
        seen.append([(s, cache.lengths[s], cache.keys[:, s, :, : cache.lengths[s]].clone()) for s in slots])
        return original(cache, slots, roots, **options)

    drafter.draft = spy  # type: ignore[method-assign]
    generations = decoder.run([Request(p, SamplingParams(max_new_tokens=30, ignore_eos=True)) for p in prompts(2, 8)])
    for slot, length, keys in seen[-1] + seen[0]:
        tokens = generations[slot].tokens[:length]
        cache, context = target.new_cache(1, 256), drafter.new_cache(1, 256)
        from dominotree.targets.rows import Segment

        features = target.forward(cache, [Segment(0, 0, tokens)], feature_layers=drafter.feature_layers).features
        assert features is not None
        drafter.extend(context, [0], [length], features)
        torch.testing.assert_close(keys, context.keys[:, 0, :, :length], atol=1e-5, rtol=0)
