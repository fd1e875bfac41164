"""Trees sized by what they cost and by what they are likely to gain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log

from dominotree.calibration import Calibration
from dominotree.costs import CostModel
from dominotree.methods import Method
from dominotree.tree.budget import cost_aware_count
from dominotree.tree.tree import Tree

_CONTEXT_STEP = 64
"""Tokens of context within which a round's cost is taken as the same."""


@dataclass
class Pace:
    """Whether drafting pays for one sequence, tokens a millisecond with the best tree against plain decoding's, and how
    large a tree to build.

    Rounds that draft are averaged, the newest counting most. While they do not pay, rounds go without a draft, and one
    that drafts looks again after 1, 2, 4 .. 16 of them. Trees are built to `room` nodes, twice what the last one was
    cut to, since building costs time too. The output is the same either way.
    """

    room: int = 16
    gain: float = 1.25
    waited: int = 0
    patience: int = 1

    @property
    def drafts(self) -> bool:
        """Whether the next round should draft."""
        return self.gain >= 1 or self.waited >= self.patience

    def skipped(self) -> None:
        """A round went without a draft."""
        self.waited += 1

    def drafted(self, gain: float, nodes: int) -> None:
        """A round drafted, and its best tree, of so many nodes, was worth `gain` times plain decoding."""
        self.room = max(4, 2 * nodes)
        self.gain += 0.3 * (gain - self.gain)
        self.patience = 1 if self.gain >= 1 else min(2 * self.patience, 16) if self.waited else self.patience
        self.waited = 0


class AdaptiveBudget:
    """Cuts a tree that was built to its cap, by the cost-aware rule, and learns from what became of it."""

    def __init__(self, costs: CostModel, calibration: Calibration) -> None:
        self.costs, self.calibration = costs, calibration
        self._rounds: dict[tuple[int, int], tuple[list[float], float]] = {}

    def cut(self, tree: Tree, method: Method, context: int, pace: Pace) -> Tree:
        """The leading part of `tree` that is worth verifying behind `context` committed tokens.

        Under the `calibrated` rule the nodes are put into the order of their calibrated chances first, and `pace` is
        told what the round is worth.
        """
        if not len(tree):
            return tree
        if method.rule == "calibrated":
            tree = tree.reordered(self._calibrated_scores(tree))
        costs, plain = self._round_costs(len(tree), context)
        chances = [exp(score) for score in tree.score]
        count = cost_aware_count(chances, costs)
        if method.rule == "calibrated":
            pace.drafted((1.0 + sum(chances[:count])) / costs[count] * plain, count)
        return tree.first(count)

    def observe(self, tree: Tree, path: Sequence[int], choices: Sequence[int]) -> None:
        """Learns from a walk: `path` are the nodes walked (-1, the root, first), `choices` the tokens taken there."""
        for node, token in zip(path, choices, strict=False):
            children = tree.children(node)
            if children:
                chosen = tree.child_with_token(node, token)
                place = children.index(chosen) if chosen is not None else None
                given = [tree.given[child] for child in children]
                self.calibration.observe(tree.depth[children[0]], given, place)

    def _round_costs(self, nodes: int, context: int) -> tuple[list[float], float]:
        """Milliseconds of rounds that verify 0 .. `nodes` of so many built nodes, and of one without a draft."""
        step = context // _CONTEXT_STEP
        if (nodes, step) not in self._rounds:
            middle = step * _CONTEXT_STEP + _CONTEXT_STEP // 2
            self._rounds[nodes, step] = self.costs.round(nodes, middle).tolist(), self.costs.plain(middle)
        return self._rounds[nodes, step]

    def _calibrated_scores(self, tree: Tree) -> list[float]:
        scores: list[float] = []
        for depth, parent, given in zip(tree.depth, tree.parent, tree.given, strict=True):
            chance = log(self.calibration.acceptance(depth, given))
            scores.append(chance + (scores[parent] if parent >= 0 else 0.0))
        return scores
