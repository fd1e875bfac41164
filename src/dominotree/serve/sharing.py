"""Under load the rows of a pass go to the best nodes of all sequences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dominotree.costs import CostModel
from dominotree.tree.tree import Tree

CPU_ROWS = 64
GPU_ROWS = 512


class RowShare:
    """Cuts the trees of a round so that the nodes kept are the likeliest of all of them.

    Every sequence has its root's row whatever happens, so one without a tree costs one row. A drafted node is worth
    the probability that its whole path is accepted; nodes are taken in that order across sequences. With a cost
    profile as many as make the most of the pass's time, else as many as fit into `max_rows`. Only speed depends on
    it, never the output.
    """

    def __init__(self, max_rows: int, costs: CostModel | None = None) -> None:
        self.max_rows, self.costs = max_rows, costs

    @classmethod
    def on(cls, device: torch.device, max_rows: int | None, costs: CostModel | None) -> RowShare:
        """The rule for a device: a limit that was given, else the profile, else what is safe there."""
        if max_rows is not None:
            return cls(max_rows)
        return cls(CPU_ROWS if device.type == "cpu" else GPU_ROWS, costs)

    def __call__(self, trees: Sequence[Tree], sequences: int, context: int) -> list[Tree]:
        """The leading parts of `trees`, for a pass of `sequences` roots behind at most `context` tokens."""
        scores = np.array([score for tree in trees for score in tree.score])
        owners = np.repeat(np.arange(len(trees)), [len(tree) for tree in trees])
        order = np.argsort(-scores, kind="stable")  # within a tree best first already, so leading parts stay trees
        count = self._count(np.exp(scores[order]), sequences, context)
        kept = np.bincount(owners[order[:count]], minlength=len(trees))
        return [tree.first(int(n)) if n < len(tree) else tree for tree, n in zip(trees, kept, strict=True)]

    def _count(self, chances: np.ndarray, sequences: int, context: int) -> int:
        """How many of the nodes, best first, to verify beside the roots."""
        if self.costs is None:
            return max(0, min(len(chances), self.max_rows - sequences))
        ms = self.costs.round(len(chances), context, sequences=sequences)
        gains = sequences + np.concatenate([[0.0], np.cumsum(chances)])
        return int(np.argmax(gains / ms))
