"""A continuation from another source joined to a tree."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log

from dominotree.tree.tree import Tree

_OFFSET, _WEIGHT, _LEAST = 0.9, 0.33, 1e-3
"""How two opinions add up in log-odds, fitted to the default pair's own answers: that of the drafter counts a third,
since it errs with more confidence. What it does not propose has the least probability."""


def join(tree: Tree, tokens: Sequence[int], chances: Sequence[float], size: int) -> Tree:
    """The best `size` nodes of a tree and of a path of `tokens` from its root.

    `chances[i]`, between 0 and 1, is what the other source gives `tokens[i]` where the path before it is right. A node
    of the path gets what both sources make of it together, its siblings share the rest as they did, and what is below
    moves along. Tokens that no node proposes are added.
    """
    path = [-1]
    for token in tokens:
        child = tree.child_with_token(path[-1], token)
        if child is None:
            break
        path.append(child)
    factor = {}  # what becomes of the probability of the children of a node of the path, but for the one on it
    joined = {}
    for at, (node, chance) in enumerate(zip(path, chances, strict=False)):
        on = path[at + 1] if at + 1 < len(path) else None
        p = 0.0 if on is None else min(tree.given[on], 1 - _LEAST)
        joined[on] = _together(max(p, _LEAST), chance)
        factor[node] = (1 - joined[on]) / (1 - p)
    given: list[float] = []
    score: list[float] = []
    for node, (parent, p) in enumerate(zip(tree.parent, tree.given, strict=True)):
        given.append(joined[node] if node in joined else min(p * factor.get(parent, 1.0), 1.0))
        score.append(log(max(given[-1], 1e-9)) + (score[parent] if parent >= 0 else 0.0))
    added = range(len(path) - 1, min(len(tokens), len(path) - 1 + size))
    parents = [path[-1], *range(len(tree), len(tree) + len(added))][: len(added)]
    for at, parent in zip(added, parents, strict=True):
        given.append(joined[None] if parent == path[-1] else chances[at])
        score.append(log(given[-1]) + (score[parent] if parent >= 0 else 0.0))
    both = Tree(
        token=[*tree.token, *(tokens[at] for at in added)],
        parent=[*tree.parent, *parents],
        depth=[*tree.depth, *added],
        score=score,
        given=given,
    )
    return both.reordered(score).first(size)


def _together(p: float, chance: float) -> float:
    odds = log(chance / (1 - chance)) + _OFFSET + _WEIGHT * log(p / (1 - p))
    return 1 / (1 + exp(-odds))
