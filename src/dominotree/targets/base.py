"""What the decode loop needs from a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from dominotree.targets.cache import SlotCache
from dominotree.targets.rows import Segment


@dataclass(frozen=True)
class Forward:
    """What a pass returns, rows flattened in the order of its segments.

    `logits` `[rows asked for, vocab]` in the target's dtype; `features` `[rows, len(feature_layers) * hidden]`, the
    outputs of those decoder layers side by side, or None when no layer was asked for; `best` the first place of the
    largest logit of each row, -1 where it holds a NaN, if asked for.
    """

    logits: torch.Tensor
    features: torch.Tensor | None
    best: Sequence[int] = ()


class Lender(Protocol):
    """What a drafter borrows of its target: embedding, head and sizes."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token embeddings `[..., hidden]`."""
        ...

    def head_weight(self) -> torch.Tensor:
        """The output embedding `[vocab, hidden]`."""
        ...


class Target(Lender, Protocol):
    """A causal LM that can run trees of tokens over a slot cache."""

    max_positions: int
    row_invariant: bool
    precision: str
    """What the weights are kept in: float32, bfloat16, float16 or int8."""

    def new_cache(self, slots: int, length: int) -> SlotCache:
        """A cache of `slots` sequences of up to `length` columns each, tails included."""
        ...

    def forward(
        self,
        cache: SlotCache,
        segments: Sequence[Segment],
        *,
        feature_layers: Sequence[int] = (),
        last_only: bool = False,
        best: bool = False,
    ) -> Forward:
        """Runs the rows of `segments`; their keys and values go to the columns behind the committed ones.

        `last_only`: logits of each segment's last row only. `best`: which are the largest, too.
        """
        ...
