"""Under load the rows of a pass go to the best nodes of all sequences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dominotree.adaptive import Pace, Worth
from dominotree.costs import CostModel
from dominotree.machine import cpu_has_bf16
from dominotree.tree.tree import Tree

CPU_ROWS = 64
SLOW_CPU_ROWS = 16
"""Where the processor does not multiply bf16 itself, a row costs more than its share of memory."""
GPU_ROWS = 512

_FADE, _UNTESTED = 0.95, 0.5
"""What is known of how far chances can be believed fades by this with every draft, and where nothing of it was
verified: a drafter that was wrong for a while is to have another chance.
"""
_PRIOR = 10.0
"""Nodes, expected and accepted, that a drafter is credited with beforehand."""


class RowShare:
    """Cuts the trees of a round so that the nodes kept are the likeliest of all of them.

    Every sequence has its root's row whatever happens, so one without a tree costs one row. A drafted node is worth
    the probability that its whole path is accepted; nodes are taken in that order across sequences. With a cost
    profile as many as make the most of the pass's time, else as many as fit into `max_rows`.

    With a profile, rounds of so many sequences that drafting for them has not paid of late go without. Drafters are
    surer of themselves than they should be: the chances of all nodes are lowered by the factor by which fewer than
    expected were accepted. Only speed depends on any of it, never the output.
    """

    def __init__(self, max_rows: int, costs: CostModel | None = None) -> None:
        self.max_rows, self.costs = max_rows, costs
        self._paces: dict[int, Pace] = {}
        self._expected = self._accepted = self._expected_now = 0.0
        self._drafted = 0

    @classmethod
    def on(cls, device: torch.device, max_rows: int | None, costs: CostModel | None) -> RowShare:
        """The rule for a device: a limit that was given, else the profile, else what is safe there."""
        if max_rows is not None:
            return cls(max_rows)
        rows = GPU_ROWS if device.type != "cpu" else CPU_ROWS if cpu_has_bf16() else SLOW_CPU_ROWS
        return cls(rows, costs)

    def pays(self, sequences: int) -> bool:
        """Whether the next round, of so many sequences, should draft."""
        return self.costs is None or self._paces.setdefault(sequences, Pace()).drafts()

    def cut(self, trees: Sequence[Tree], sequences: int, context: int, drafted: int) -> list[Tree]:
        """The leading parts of `trees`, for a pass of `sequences` roots behind at most `context` tokens.

        `drafted` of the sequences drafted; the other trees are what texts themselves say.
        """
        self._drafted = drafted
        scores = np.array([score for tree in trees for score in tree.score])
        owners = np.repeat(np.arange(len(trees)), [len(tree) for tree in trees])
        order = np.argsort(-scores, kind="stable")  # within a tree best first already, so leading parts stay trees
        count = self._count(np.exp(scores[order]), drafted, sequences, context)
        kept = np.bincount(owners[order[:count]], minlength=len(trees))
        return [tree.first(int(n)) if n < len(tree) else tree for tree, n in zip(trees, kept, strict=True)]

    def observe(self, accepted: int) -> None:
        """Learns how many of the nodes that were kept the target accepted; of a round without drafts nothing."""
        if not self._drafted:
            return
        fade = _FADE if self._expected_now else _UNTESTED
        self._expected = fade * self._expected + self._expected_now
        self._accepted = fade * self._accepted + accepted

    def _count(self, chances: np.ndarray, drafted: int, sequences: int, context: int) -> int:
        """How many of the nodes, best first, to verify beside the roots."""
        if self.costs is None:
            return max(0, min(len(chances), self.max_rows - sequences))
        if drafted:
            ms = self.costs.round(len(chances), context, sequences=sequences)
            ms += self.costs.draft(context, drafted) - self.costs.draft(context, sequences)
        else:
            ms = self.costs.verify(len(chances) + sequences, context, sequences)[sequences - 1 :]
            ms = ms + sequences * self.costs.rest_ms
        believed = min(1.0, (_PRIOR + self._accepted) / (_PRIOR + self._expected))
        accepted = np.concatenate([[0.0], np.cumsum(chances)])
        gains = sequences + believed * accepted
        count = int(np.argmax(gains / ms))
        worth = Worth(count, float(gains[count]), float(ms[count]))
        pace = self._paces.setdefault(sequences, Pace())
        if drafted:
            pace.drafted(worth, Worth(0, float(sequences), self.costs.plain(context, sequences)))
        else:
            pace.rested(worth)
        self._expected_now = float(accepted[count])
        return count
