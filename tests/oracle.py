"""Drafters that force acceptance or rejection where a random one exercises nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from dominotree.costs import CostModel
from dominotree.drafters.dflash import Draft, Drafter
from dominotree.targets.base import Target
from dominotree.targets.cache import SlotCache
from drafters.synthetic import tiny_config, tiny_tensors


def tiny_drafter(target: Target, *, seed: int = 0, **changes: object) -> Drafter:
    """A random drafter for a tiny target."""
    config = tiny_config(hidden=target.hidden_size, vocab=target.vocab_size, target_layers=target.num_layers, **changes)  # type: ignore[arg-type]
    return Drafter(config, tiny_tensors(config, seed=seed), target)


class OracleDrafter(Drafter):
    """Knows what each slot's sequence will be, and spoils its knowledge at random.

    At every depth the true token is the favourite (`right`), hides behind a wrong favourite (`sibling`), or is not
    proposed at all (`wrong`), with these weights. The correction head, where there is one, is random but weak.
    """

    def __init__(
        self,
        target: Target,
        scripts: Sequence[Sequence[int]],
        *,
        right: float = 1.0,
        sibling: float = 0.0,
        wrong: float = 0.0,
        seed: int = 0,
        **changes: object,
    ) -> None:
        config = tiny_config(
            hidden=target.hidden_size, vocab=target.vocab_size, target_layers=target.num_layers, **changes
        )  # type: ignore[arg-type]
        tensors = tiny_tensors(config, seed=seed)
        if "embed_proj.2.weight" in tensors:
            tensors["embed_proj.2.weight"] = tensors["embed_proj.2.weight"] * 0.1
        super().__init__(config, tensors, target)
        self.scripts = [list(script) for script in scripts]
        self._weights = (right, sibling, wrong)
        self._rng = random.Random(seed)

    def draft(self, cache: SlotCache, slots: Sequence[int], roots: Sequence[int], **options: Any) -> Draft:
        draft = super().draft(cache, slots, roots, **{**options, "texts": ()})
        base = torch.randn(draft.base.shape)
        vocab = base.shape[-1]
        for row, slot in enumerate(slots):
            script, position = self.scripts[slot], cache.lengths[slot]
            for depth in range(base.shape[1]):
                at = position + 1 + depth
                token = script[at] if at < len(script) else self._rng.randrange(vocab)
                kind = self._rng.choices(("right", "sibling", "wrong"), self._weights)[0]
                other = (token + 1 + self._rng.randrange(vocab - 1)) % vocab
                base[row, depth, token] = {"right": 9.0, "sibling": 7.5, "wrong": -9.0}[kind]
                base[row, depth, other] = 7.0 if kind == "right" else 8.0
        return Draft(draft.roots, draft.hidden, base)


def tiny_costs(slope: float = 1.0) -> CostModel:
    """A cost profile by hand: 10 and 20 ms at contexts of 100 and 200, and `slope` ms a node."""
    rows = [1, 2, 4, 8, 16]
    curves = [[base + slope * (r - 1) for r in rows] for base in (10, 20)]
    draft = [[1.0, 2.0], [2.0, 4.0]]  # of one depth and of four
    each = [3.0, 6.0], [1.0, 2.0]
    return CostModel({}, [100, 200], rows, curves, curves, [1, 4], draft, [1.0] * 5, 0.5, *each, curves)
