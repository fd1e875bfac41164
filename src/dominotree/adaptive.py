"""Trees sized by what they cost and by what they are likely to gain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp, log
from typing import NamedTuple

from dominotree.calibration import Calibration
from dominotree.costs import CostModel, lower_hull
from dominotree.methods import Method
from dominotree.tree.budget import Sizing, cost_aware_count
from dominotree.tree.tree import Tree

_CONTEXT_STEP = 64
"""Tokens of context within which a round's cost is taken as the same."""
_FADE, _FADE_FAST = 0.95, 0.9
"""What a round counts for beside the one after it: in a sequence's rate, in whether a draft pays."""
_OPEN = 0.5
"""How much a text has to leave open for a draft to be tried that has not paid of late."""


class Worth(NamedTuple):
    """What a round is expected to yield with a tree of so many nodes, and to take."""

    nodes: int
    tokens: float
    ms: float


@dataclass
class Pace:
    """Whether drafting pays for one sequence, how large a tree to build, and what a millisecond should be worth.

    Expected tokens and milliseconds are summed over rounds, the newest counting most. A draft pays where what it
    `added` to the trees of late is worth more than the time it took: less of that the likelier the text itself says
    what follows. While it does not pay even where the text says nothing, a round that drafts looks again after 1, 2, 4
    .. 16 that do not, sooner once one of them paid. Trees are built to `room` nodes, twice what the last one was cut
    to, and `reach` depths are drafted, two more than it had left and at least 3, since either costs time too. The
    output is the same either way.
    """

    room: int = 16
    reach: int = 8
    tokens: float = 0.0
    ms: float = 0.0
    waited: int = 0
    patience: int = 1
    _added: float = 1.0
    _open: float = 1.0
    _dearer: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens a millisecond of late, as expected; 0 before the first round."""
        return self.tokens / self.ms if self.ms else 0.0

    @property
    def added(self) -> float:
        """Tokens that a draft adds to a round in which the text itself says nothing."""
        return self._added / self._open

    def drafts(self, said: float = 0.0) -> bool:
        """Whether this round should draft, where the text itself says the next token with that chance.

        One that should not although the text says little is counted.
        """
        price = self.rate * self._dearer
        if self.added >= price:
            return self.added * _unsaid(said) >= price
        if _unsaid(said) < _OPEN:
            return False
        if self.waited >= self.patience:
            return True
        self.waited += 1
        return False

    def drafted(self, tree: Worth, alone: Worth, said: float = 0.0) -> None:
        """A round drafted, and is worth `tree`; without a draft it would be worth `alone`."""
        self.room = max(8, 2 * tree.nodes)
        self._passed(tree)
        # A draft that makes less of what the text says has shown it to be wrong: that takes nothing away.
        added, dearer = max(0.0, tree.tokens - alone.tokens), tree.ms - alone.ms
        self._added = _FADE_FAST * self._added + added
        self._open = _FADE_FAST * self._open + _unsaid(said)
        self._dearer = _FADE_FAST * self._dearer + (1 - _FADE_FAST) * dearer if self._dearer else dearer
        if added >= self.rate * dearer:
            self.patience = 1
        elif self.waited:
            self.patience = min(2 * self.patience, 16)
        self.waited = 0

    def rested(self, tree: Worth) -> None:
        """A round went without a draft, and is worth so much."""
        self.room = max(self.room, 2 * tree.nodes)
        self._passed(tree)

    def _passed(self, round_: Worth) -> None:
        self.tokens, self.ms = _FADE * self.tokens + round_.tokens, _FADE * self.ms + round_.ms


def _unsaid(said: float) -> float:
    """How much a text leaves for a draft to say, where it tells the next token with that chance: it should tell the
    one after it as well.
    """
    return 1 - said * said


class AdaptiveBudget:
    """Sizes trees by the cost-aware rule, and learns from what became of them.

    A builder that can (`Trees.given` tells) ends a tree itself where no more nodes can pay; other trees are built to
    their cap. The published rule takes passes to cost what the convex curve says, the `calibrated` one as measured, in
    steps.
    """

    def __init__(self, costs: CostModel, calibration: Calibration) -> None:
        self.costs, self.calibration = costs, calibration
        self._round_ms = lru_cache(maxsize=4096)(self._round_of)
        self._undrafted_ms = lru_cache(maxsize=1024)(self._undrafted_of)
        self._hull = lru_cache(maxsize=256)(lower_hull)

    def sizing(self, method: Method, nodes: int, contexts: Sequence[int], paces: Sequence[Pace]) -> Sizing:
        """What a builder needs to size trees of at most `nodes` behind so many committed tokens."""
        calibrated = method.rule == "calibrated"
        reach = [pace.reach if calibrated else None for pace in paces]
        costs = [
            self._round_ms(nodes, _step(context), True, depths) for context, depths in zip(contexts, reach, strict=True)
        ]
        if not calibrated:
            return Sizing(costs)
        # As far as the hull goes down, some larger tree may pay although the next node does not.
        hulls = [self._hull(tuple(ms)) for ms in costs]
        return Sizing(hulls, self.calibration.mean, [pace.rate for pace in paces])

    def believed(self, tree: Tree, method: Method) -> Tree:
        """The nodes by their chances to be accepted, which become their scores, where the method has learned those."""
        return tree.reordered(self._calibrated_scores(tree)) if method.rule == "calibrated" else tree

    def cut(self, tree: Tree, method: Method, context: int, pace: Pace, text: Tree, *, sized: bool) -> Tree:
        """The leading part of `tree` that is worth verifying behind `context` committed tokens.

        `sized`: it was built no further than could pay. Under the `calibrated` rule `pace` is told what the round is
        worth, and would be worth without a draft: with `text`, what the text itself says will follow.
        """
        if method.rule != "calibrated":
            ms = self._round_ms(len(tree), _step(context), sized, None)
            return tree.first(cost_aware_count([exp(score) for score in tree.score], ms))
        worth = _best(tree, self._round_ms(len(tree), _step(context), sized, pace.reach), pace.rate)
        said = exp(text.score[0]) if len(text) else 0.0
        pace.drafted(worth, _best(text, self._undrafted_ms(len(text), _step(context)), pace.rate), said)
        kept = tree.first(worth.nodes)
        drafted = (depth for depth, given in zip(kept.depth, kept.given, strict=True) if given)
        pace.reach = 3 + max(drafted, default=0)
        return kept

    def cut_undrafted(self, text: Tree, context: int, pace: Pace) -> Tree:
        """The leading part that is worth verifying of what the text says, in a round without a draft."""
        worth = _best(text, self._undrafted_ms(len(text), _step(context)), pace.rate)
        pace.rested(worth)
        return text.first(worth.nodes)

    def observe(self, tree: Tree, path: Sequence[int], choices: Sequence[int]) -> None:
        """Learns from a walk: `path` are the nodes walked (-1, the root, first), `choices` the tokens taken there."""
        for node, token in zip(path, choices, strict=False):
            children = [child for child in tree.children(node) if tree.given[child]]  # those of the drafter
            if children:
                chosen = tree.child_with_token(node, token)
                place = children.index(chosen) if chosen in children else None
                given = [tree.given[child] for child in children]
                self.calibration.observe(tree.depth[children[0]], given, place)

    def _round_of(self, nodes: int, step: int, sized: bool, depths: int | None) -> list[float]:
        """Milliseconds of rounds that verify 0 .. `nodes` nodes of a draft of so many depths: as measured, in steps.

        Without `depths` of a whole draft, by the convex curve. `step` is that of the context.
        """
        stepped = depths is not None
        return self.costs.round(nodes, _middle(step), depths=depths, sized=sized, stepped=stepped).tolist()  # type: ignore[no-any-return]

    def _undrafted_of(self, nodes: int, step: int) -> list[float]:
        """Milliseconds of rounds without a draft that verify 0 .. `nodes` nodes, as measured, in steps."""
        ms = self.costs.verify(nodes + 1, _middle(step), stepped=True) + self.costs.rest_ms
        return ms.tolist()  # type: ignore[no-any-return]

    def _calibrated_scores(self, tree: Tree) -> list[float]:
        scores: list[float] = []
        for depth, parent, given in zip(tree.depth, tree.parent, tree.given, strict=True):
            chance = log(self.calibration.acceptance(depth, given))
            scores.append(chance + (scores[parent] if parent >= 0 else 0.0))
        return scores


def _best(tree: Tree, ms: Sequence[float], rate: float) -> Worth:
    """The leading part of a tree that is worth most at `rate`."""
    chances = [exp(score) for score in tree.score]
    count = cost_aware_count(chances, ms, rate)
    return Worth(count, 1.0 + sum(chances[:count]), ms[count])


def _step(context: int) -> int:
    return context // _CONTEXT_STEP


def _middle(step: int) -> int:
    return step * _CONTEXT_STEP + _CONTEXT_STEP // 2
