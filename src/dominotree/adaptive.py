"""Trees sized by what they cost and by what they are likely to gain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp, log

from dominotree.calibration import Calibration
from dominotree.costs import CostModel, lower_hull
from dominotree.methods import Method
from dominotree.tree.budget import Sizing, cost_aware_count
from dominotree.tree.tree import Tree

_CONTEXT_STEP = 64
"""Tokens of context within which a round's cost is taken as the same."""
_FADE = 0.95
"""What a round counts for beside the one after it, in a sequence's rate."""


@dataclass
class Pace:
    """Whether drafting pays for one sequence, tokens a millisecond with the best tree against plain decoding's, how
    large a tree to build, and what a millisecond of verifying should be worth.

    Rounds that draft are averaged, the newest counting most. While they do not pay, rounds go without a draft, and one
    that drafts looks again after 1, 2, 4 .. 16 of them. Trees are built to `room` nodes, twice what the last one was
    cut to, and `reach` depths are drafted, two more than it had left, since either costs time too. The output is the
    same either way.
    """

    room: int = 16
    reach: int = 8
    gain: float = 1.25
    waited: int = 0
    patience: int = 1
    tokens: float = 0.0
    ms: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens a millisecond of late, as expected; 0 before the first round."""
        return self.tokens / self.ms if self.ms else 0.0

    def drafts(self) -> bool:
        """Whether this round should draft; one that should not is counted."""
        if self.gain >= 1 or self.waited >= self.patience:
            return True
        self.waited += 1
        return False

    def drafted(self, tokens: float, ms: float, plain_ms: float, nodes: int) -> None:
        """A round drafted: its best tree, of so many nodes, is expected to yield `tokens` in `ms`; without a draft it
        would yield one in `plain_ms`.
        """
        self.room = max(8, 2 * nodes)
        self.tokens, self.ms = _FADE * self.tokens + tokens, _FADE * self.ms + ms
        self.gain += 0.3 * (tokens / ms * plain_ms - self.gain)
        self.patience = 1 if self.gain >= 1 else min(2 * self.patience, 16) if self.waited else self.patience
        self.waited = 0


class AdaptiveBudget:
    """Sizes trees by the cost-aware rule, and learns from what became of them.

    A builder that can (`Trees.given` tells) ends a tree itself where no more nodes can pay; other trees are built to
    their cap. The published rule takes passes to cost what the convex curve says, the `calibrated` one as measured, in
    steps.
    """

    def __init__(self, costs: CostModel, calibration: Calibration) -> None:
        self.costs, self.calibration = costs, calibration
        self._rounds: dict[tuple[int, int, bool, bool], tuple[list[float], float]] = {}
        self._hull = lru_cache(maxsize=256)(lower_hull)

    def sizing(self, method: Method, nodes: int, contexts: Sequence[int], paces: Sequence[Pace]) -> Sizing:
        """What a builder needs to size trees of at most `nodes` behind so many committed tokens."""
        stepped = method.rule == "calibrated"
        costs = [self._round_ms(nodes, context, sized=True, stepped=stepped)[0] for context in contexts]
        if not stepped:
            return Sizing(costs)
        # As far as the hull goes down, some larger tree may pay although the next node does not.
        hulls = [self._hull(tuple(ms)) for ms in costs]
        return Sizing(hulls, self.calibration.mean, [pace.rate for pace in paces])

    def believed(self, tree: Tree, method: Method) -> Tree:
        """The nodes by their chances to be accepted, which become their scores, where the method has learned those."""
        return tree.reordered(self._calibrated_scores(tree)) if method.rule == "calibrated" else tree

    def cut(self, tree: Tree, method: Method, context: int, pace: Pace, *, sized: bool) -> Tree:
        """The leading part of `tree` that is worth verifying behind `context` committed tokens.

        `sized`: it was built no further than could pay. Under the `calibrated` rule `pace` is told what the round is
        worth.
        """
        if not len(tree) and not sized:
            return tree
        calibrated = method.rule == "calibrated"
        costs, plain = self._round_ms(len(tree), context, sized=sized, stepped=calibrated)
        chances = [exp(score) for score in tree.score]
        count = cost_aware_count(chances, costs, pace.rate if calibrated else 0.0)
        kept = tree.first(count)
        if calibrated:
            pace.drafted(1.0 + sum(chances[:count]), costs[count], plain, count)
            drafted = (depth for depth, given in zip(kept.depth, kept.given, strict=True) if given)
            pace.reach = 3 + max(drafted, default=0)
        return kept

    def cut_undrafted(self, tree: Tree, context: int, pace: Pace) -> Tree:
        """The leading part that is worth verifying of a tree that cost no draft, at the sequence's rate of late."""
        if not len(tree):
            return tree
        ms = self.costs.verify(len(tree) + 1, context, stepped=True) + self.costs.rest_ms
        count = cost_aware_count([exp(score) for score in tree.score], ms.tolist(), pace.rate or 1 / float(ms[0]))
        pace.room = max(pace.room, 2 * count)
        return tree.first(count)

    def observe(self, tree: Tree, path: Sequence[int], choices: Sequence[int]) -> None:
        """Learns from a walk: `path` are the nodes walked (-1, the root, first), `choices` the tokens taken there."""
        for node, token in zip(path, choices, strict=False):
            children = [child for child in tree.children(node) if tree.given[child]]  # those of the drafter
            if children:
                chosen = tree.child_with_token(node, token)
                place = children.index(chosen) if chosen in children else None
                given = [tree.given[child] for child in children]
                self.calibration.observe(tree.depth[children[0]], given, place)

    def _round_ms(self, nodes: int, context: int, *, sized: bool, stepped: bool) -> tuple[list[float], float]:
        """Milliseconds of rounds that verify 0 .. `nodes` nodes, as `CostModel.round`, and of one without a draft."""
        step = context // _CONTEXT_STEP
        known = self._rounds.get((nodes, step, sized, stepped))
        if known is None:
            middle = step * _CONTEXT_STEP + _CONTEXT_STEP // 2
            ms = self.costs.round(nodes, middle, sized=sized, stepped=stepped)
            known = ms.tolist(), self.costs.plain(middle)
            self._rounds[nodes, step, sized, stepped] = known
        return known

    def _calibrated_scores(self, tree: Tree) -> list[float]:
        scores: list[float] = []
        for depth, parent, given in zip(tree.depth, tree.parent, tree.given, strict=True):
            chance = log(self.calibration.acceptance(depth, given))
            scores.append(chance + (scores[parent] if parent >= 0 else 0.0))
        return scores
