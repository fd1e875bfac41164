"""An audit compares every token, and tells a tie from a bug."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dominotree.bench import audit as audit_module
from dominotree.bench.audit import audit
from dominotree.bench.lossless import Difference
from dominotree.methods import Drafting
from dominotree.pair import Pair
from oracle import tiny_drafter
from targets.tiny import tiny_target

PROMPTS = [[5, 9, 33, 2, 61], [7, 8], [40, 41, 42]]


def make_pair(dtype: torch.dtype = torch.float32, *, exact: bool = True) -> Pair:
    target = tiny_target("llama", exact=exact, dtype=dtype)
    return Pair(target, None, tiny_drafter(target), context=256)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_method_that_gives_plain_decodings_tokens_passes(dtype: torch.dtype) -> None:
    told: list[str] = []
    pair = make_pair(dtype)
    found = audit(pair, PROMPTS, Drafting("dominotree", 6), [0.0, 0.9], max_new_tokens=20, tick=told.append)
    assert [one.temperature for one in found] == [0.0, 0.9]
    for one in found:
        assert (one.prompts, one.identical, one.partings) == (3, 3, [])
        assert one.tokens == one.compared > 20
        assert one.dtype == str(dtype).removeprefix("torch.")
        assert one.row_invariant == pair.target.row_invariant
    assert len(told) == 6


def test_the_seed_decides_the_draws() -> None:
    pair, drafting = make_pair(), Drafting("domino")
    lengths = {
        seed: [one.tokens for one in audit(pair, PROMPTS, drafting, [2.0], seed=seed, max_new_tokens=200)]
        for seed in (1, 2)
    }
    assert lengths[1] != lengths[2]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("exact", [True, False])
def test_a_forward_that_is_wrong_for_trees_is_a_bug(
    monkeypatch: pytest.MonkeyPatch, temperature: float, exact: bool
) -> None:
    pair = make_pair(exact=exact)
    honest = pair.target.forward

    def broken(cache: Any, segments: Any, **options: Any) -> Any:
        out = honest(cache, segments, **options)
        return replace(out, logits=out.logits.roll(1, dims=-1), best=()) if segments[0].parents else out

    monkeypatch.setattr(pair.target, "forward", broken)
    (found,) = audit(pair, PROMPTS, Drafting("dominotree", 6), [temperature], max_new_tokens=20)
    assert len(found.bugs) == len(found.partings) == 3
    assert found.identical == 0
    assert found.compared < found.tokens
    entry = found.to_json()
    assert entry["bugs"] == 3
    assert [difference["prompt"] for difference in entry["differences"]] == [0, 1, 2]
    assert all(difference["margin"] > 0 for difference in entry["differences"])


def test_a_tie_counts_apart_from_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = iter(["tie", None, "BUG"])

    def judged(*_: Any, **__: Any) -> Difference | None:
        kind = next(kinds)
        return None if kind is None else Difference(4, 1, 2, kind, "because", 0.0)  # type: ignore[arg-type]

    monkeypatch.setattr(audit_module, "first_difference", judged)
    (found,) = audit(make_pair(), PROMPTS, Drafting("domino"), [0.0], max_new_tokens=20)
    assert [parting.prompt for parting in found.ties] == [0]
    assert [parting.prompt for parting in found.bugs] == [2]
    assert (found.identical, found.prompts) == (1, 3)
    assert found.compared == found.tokens - 2 * 16


def test_more_than_method_and_budget_reaches_the_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Drafting] = []
    generate = audit_module.generate

    def spy(pair: Any, ids: Any, sampling: Any, drafting: Drafting) -> Any:
        used.append(drafting)
        return generate(pair, ids, sampling, drafting)

    monkeypatch.setattr(audit_module, "generate", spy)
    drafting = Drafting("dominotree", 5, 4, 2)
    audit(make_pair(), PROMPTS[:1], drafting, [0.0], max_new_tokens=8)
    assert used == [Drafting("ar"), drafting]
