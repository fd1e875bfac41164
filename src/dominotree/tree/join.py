"""A continuation from another source joined to a tree."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import exp, log

from dominotree.tree.tree import Tree

_OFFSET, _WEIGHT, _LEAST = 0.9, 0.33, 1e-3
"""How two opinions add up in log-odds: that of the drafter counts a third, since it errs with more confidence. What it
does not propose has the least probability."""


def path_of(tokens: Sequence[int], chances: Sequence[float]) -> Tree:
    """A continuation as a tree of its own: one path. `chances[i]` is that of `tokens[i]` if all before it are right."""
    score = list(accumulate(log(chance) for chance in chances))
    return Tree(list(tokens), list(range(-1, len(tokens) - 1)), list(range(len(tokens))), score, [0.0] * len(tokens))


def join(tree: Tree, tokens: Sequence[int], chances: Sequence[float], size: int) -> Tree:
    """The best `size` nodes of a tree and of a path of `tokens` from its root.

    `chances[i]`, between 0 and 1, is what the other source gives `tokens[i]` where the path before it is right. By its
    score a node of the path gets what both sources make of it together, its siblings share the rest as they did, and
    what is below moves along. Tokens that no node proposes are added, `given` 0.
    """
    path = [-1]
    for token in tokens:
        child = tree.child_with_token(path[-1], token)
        if child is None:
            break
        path.append(child)
    below = [
        s - (tree.score[parent] if parent >= 0 else 0.0) for s, parent in zip(tree.score, tree.parent, strict=True)
    ]
    joined: dict[int | None, float] = {}  # log-probabilities of the path's nodes below their parents
    rest: dict[int, float] = {}  # what the other children of a node of the path gain
    for at, (node, chance) in enumerate(zip(path, chances, strict=False)):
        on = path[at + 1] if at + 1 < len(path) else None
        p = 0.0 if on is None else min(exp(below[on]), 1 - _LEAST)
        together = _together(max(p, _LEAST), chance)
        joined[on], rest[node] = log(together), log((1 - together) / (1 - p))
    score: list[float] = []
    for node, parent in enumerate(tree.parent):
        own = joined[node] if node in joined else min(below[node] + rest.get(parent, 0.0), 0.0)
        score.append(own + (score[parent] if parent >= 0 else 0.0))
    added = range(len(path) - 1, min(len(tokens), len(path) - 1 + size))
    parents = [path[-1], *range(len(tree), len(tree) + len(added))][: len(added)]
    for at, parent in zip(added, parents, strict=True):
        own = joined[None] if parent == path[-1] else log(chances[at])
        score.append(own + (score[parent] if parent >= 0 else 0.0))
    both = Tree(
        token=[*tree.token, *(tokens[at] for at in added)],
        parent=[*tree.parent, *parents],
        depth=[*tree.depth, *added],
        score=score,
        given=[*tree.given, *(0.0 for _ in added)],
    )
    return both.reordered(score).first(size)


def _together(p: float, chance: float) -> float:
    odds = log(chance / (1 - chance)) + _OFFSET + _WEIGHT * log(p / (1 - p))
    return 1 / (1 + exp(-odds))
