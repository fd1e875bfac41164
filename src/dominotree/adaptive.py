"""Trees sized by what they cost and by what they are likely to gain."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dominotree.calibration import Calibration
from dominotree.costs import CostModel
from dominotree.methods import Method
from dominotree.tree.budget import cost_aware_count
from dominotree.tree.tree import Tree


class AdaptiveBudget:
    """Cuts a tree that was built to its cap, by the cost-aware rule, and learns from what became of it."""

    def __init__(self, costs: CostModel, calibration: Calibration) -> None:
        self.costs, self.calibration = costs, calibration

    def cut(self, tree: Tree, method: Method, context: int) -> Tree:
        """The leading part of `tree` that is worth verifying behind `context` committed tokens.

        Under the `calibrated` rule the nodes are put into the order of their calibrated chances first.
        """
        if not len(tree):
            return tree
        if method.rule == "calibrated":
            tree = tree.reordered(self._calibrated_scores(tree))
        chances = np.exp(np.array(tree.score))
        return tree.first(cost_aware_count(chances, self.costs.round(len(tree), context)))

    def observe(self, tree: Tree, path: Sequence[int], choices: Sequence[int]) -> None:
        """Learns from a walk: `path` are the nodes walked (-1, the root, first), `choices` the tokens taken there."""
        for node, token in zip(path, choices, strict=False):
            children = tree.children(node)
            if children:
                chosen = tree.child_with_token(node, token)
                place = children.index(chosen) if chosen is not None else None
                given = [tree.given[child] for child in children]
                self.calibration.observe(tree.depth[children[0]], given, place)

    def _calibrated_scores(self, tree: Tree) -> list[float]:
        agreed = self.calibration.acceptance(np.array(tree.depth), np.array(tree.given))
        scores: list[float] = []
        for parent, chance in zip(tree.parent, np.log(agreed).tolist(), strict=True):
            scores.append(chance + (scores[parent] if parent >= 0 else 0.0))
        return scores
