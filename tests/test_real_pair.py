"""The default pair: a real model, real prompts, real drafters."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import dominotree as dt
from dominotree import native
from dominotree.costs import measure
from dominotree.methods import METHODS
from dominotree.targets.rows import Segment

pytestmark = pytest.mark.pair

BUILTIN = Path(dt.__file__).parent / "bench" / "builtin"
SHARED = Path(os.environ.get("DOMINOTREE_SHARED", Path(__file__).parents[2] / "shared")) / "data" / "bench"


def prompts(count: int) -> list[str]:
    """First turns of mixed kinds, taken in turn from every set there is."""
    folder = SHARED if SHARED.is_dir() else BUILTIN
    sets = [
        [json.loads(line)["turns"][0] for line in file.read_text().splitlines()]
        for file in sorted(folder.glob("*.jsonl"))
    ]
    return [text for texts in zip(*sets, strict=False) for text in texts][:count]


@pytest.fixture(scope="module")
def pairs() -> dict[str, dt.Pair]:
    return {}


def load(pairs: dict[str, dt.Pair], dtype: str) -> dt.Pair:
    if dtype not in pairs:
        if dtype != "float32" and not native.available():
            pytest.skip(f"bf16 is compared bit for bit through the C kernels, and {native.reason()}")
        pairs[dtype] = dt.load(dtype=dtype, progress=False)
        assert pairs[dtype].target.row_invariant or not native.available()
    return pairs[dtype]


def test_logits_match_transformers_in_fp32(pairs: dict[str, dt.Pair]) -> None:
    from transformers import AutoModelForCausalLM

    from dominotree.hub import resolve_target

    pair = load(pairs, "float32")
    model = AutoModelForCausalLM.from_pretrained(resolve_target("smollm2-135m"), dtype=torch.float32).eval()
    for text in prompts(3):
        ids = pair.prompt_ids(text)[:200]
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0]
        got = pair.target.forward(pair.target.new_cache(1, 256), [Segment(0, 0, ids)]).logits
        torch.testing.assert_close(got, expected, atol=5e-4, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_methods_equal_plain_decoding_on_a_few_prompts(
    pairs: dict[str, dt.Pair], dtype: str, temperature: float
) -> None:
    pair = load(pairs, dtype)
    texts, options = prompts(4), {"temperature": temperature, "seed": 11, "max_new_tokens": 32}
    plain = [o.token_ids for o in pair.generate(texts, method="ar", **options)]
    for method in ("lookuptree", "dominotree", "domino", "ddtree"):
        assert [o.token_ids for o in pair.generate(texts, method=method, **options)] == plain, method
    alone = [pair.generate(text, method="dominotree", budget=7, **options).token_ids for text in texts]
    assert alone == plain


def test_the_drafter_is_worth_its_passes(pairs: dict[str, dt.Pair]) -> None:
    """A misread checkpoint (slot, layer or state off by one) still decodes correctly; only acceptance tells."""
    pair = load(pairs, "float32")
    texts = prompts(4)
    taus = {}
    trees = {"budget": 16}
    for method, options in {"dflash": {}, "domino": {}, "marginal": trees, "dominotree": trees}.items():
        outputs = pair.generate(texts, method=method, max_new_tokens=48, **options)
        taus[method] = sum(o.stats.mean_accepted for o in outputs) / len(outputs)
    assert taus["dflash"] > 1.6
    assert taus["dominotree"] > 2.2
    assert taus["dominotree"] > max(taus["domino"], taus["marginal"])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_every_method_equals_plain_decoding_on_twenty_prompts(
    pairs: dict[str, dt.Pair], dtype: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = load(pairs, dtype)
    costs = measure(pair.name, pair.target, pair.drafter, contexts=[64, 256], rows=[1, 9, 33], repeats=1)
    monkeypatch.setattr("dominotree.pair.find_profile", lambda *_: costs)
    pair._decoders.clear()
    texts, options = prompts(20), {"temperature": temperature, "seed": 5, "max_new_tokens": 128}
    budget = 16 if dtype == "bfloat16" else 5  # rows cost time in fp32
    plain = [o.token_ids for o in pair.generate(texts, method="ar", **options)]
    for method in METHODS:
        for noise_aware in {False, temperature > 0 and method in ("dominotree", "domino", "ddtree")}:
            if method != "ar":
                outputs = pair.generate(texts, method=method, budget=budget, noise_aware=noise_aware, **options)
                assert [o.token_ids for o in outputs] == plain, (method, noise_aware)
