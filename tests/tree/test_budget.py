"""The cost-aware rule, and trees put into another order."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dominotree.tree.budget import cost_aware_count
from dominotree.tree.tree import Tree


@given(
    st.lists(st.floats(0, 1), max_size=30),
    st.floats(1, 50),
    st.lists(st.floats(0, 2), min_size=30, max_size=30),
)
@settings(deadline=None, max_examples=300)
def test_with_a_convex_cost_the_first_fall_is_the_best_size(
    chances: list[float], base: float, bends: list[float]
) -> None:
    chances = sorted(chances, reverse=True)
    cost = base + np.concatenate(([0.0], np.cumsum(np.cumsum(bends))))
    n = cost_aware_count(chances, cost)
    rates = [(1 + sum(chances[:k])) / cost[k] for k in range(len(chances) + 1)]
    assert rates[n] >= max(rates) * (1 - 1e-9)
    assert n == 0 or rates[n] > rates[n - 1]  # never a node that gains nothing


def test_free_verification_takes_all_and_dear_verification_takes_none() -> None:
    chances = [0.5, 0.25, 0.1]
    assert cost_aware_count(chances, np.ones(4)) == 3
    assert cost_aware_count(chances, np.array([1.0, 10.0, 19.0, 28.0])) == 0
    assert cost_aware_count([], np.ones(1)) == 0
    assert cost_aware_count([0.0, 0.0], np.ones(3)) == 0


def test_reordering_keeps_parents_first_and_edges_intact() -> None:
    tree = Tree([10, 11, 12, 13], [-1, 0, -1, 1], [0, 1, 0, 2], [-0.1, -0.2, -0.3, -0.4], [0.9, 0.9, 0.74, 0.8])
    moved = tree.reordered([-0.5, -0.6, -0.1, -0.6])
    assert moved.token == [12, 10, 11, 13]
    assert moved.parent == [-1, -1, 1, 2]
    assert moved.depth == [0, 0, 1, 2]
    assert moved.score == sorted(moved.score, reverse=True)
    assert moved.first(2).token == [12, 10]
    assert moved.children(-1) == [0, 1]


def test_pruning_takes_what_hangs_below_along_and_keeps_the_rest_in_order() -> None:
    tree = Tree([10, 11, 12, 13], [-1, 0, -1, 1], [0, 1, 0, 2], [-0.1, -0.2, -0.3, -0.4], [0.9, 0.9, 0.74, 0.8])
    asked: list[list[int]] = []
    kept = tree.pruned(lambda path: asked.append(path) or path != [10, 11])  # type: ignore[func-returns-value]
    assert asked == [[10], [10, 11], [12]]  # nothing of what is below a node that is gone
    assert kept == Tree([10, 12], [-1, -1], [0, 0], [-0.1, -0.3], [0.9, 0.74])
    assert tree.pruned(lambda path: path[0] == 12) == Tree([12], [-1], [0], [-0.3], [0.74])
    assert tree.pruned(lambda path: True) == tree
    assert tree.pruned(lambda path: False) == Tree()
