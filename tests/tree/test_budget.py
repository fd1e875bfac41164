"""The cost-aware rule, and trees put into another order."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dominotree import native
from dominotree.calibration import Calibration
from dominotree.tree.batched import build
from dominotree.tree.budget import Sizing, cost_aware_count
from dominotree.tree.scorers import ConditionalScorer
from dominotree.tree.tree import Tree
from tree.tabulated import random_round


@given(
    st.lists(st.floats(0, 1), max_size=30),
    st.floats(1, 50),
    st.lists(st.floats(0, 2), min_size=30, max_size=30),
)
@settings(deadline=None, max_examples=300)
def test_the_size_is_the_best_whatever_nodes_cost(chances: list[float], base: float, steps: list[float]) -> None:
    chances = sorted(chances, reverse=True)
    cost = base + np.concatenate(([0.0], np.cumsum(steps)))
    n = cost_aware_count(chances, cost)
    rates = [(1 + sum(chances[:k])) / cost[k] for k in range(len(chances) + 1)]
    assert rates[n] >= max(rates) * (1 - 1e-9)
    assert n == 0 or rates[n] > rates[n - 1]  # never a node that gains nothing


@given(
    st.lists(st.floats(0, 1), max_size=30),
    st.floats(0.01, 2),
    st.lists(st.floats(0, 2), min_size=30, max_size=30),
)
@settings(deadline=None, max_examples=300)
def test_with_a_rate_a_size_is_best_at_that_price(chances: list[float], rate: float, steps: list[float]) -> None:
    chances = sorted(chances, reverse=True)
    cost = 5 + np.concatenate(([0.0], np.cumsum(steps)))
    n = cost_aware_count(chances, cost, rate)
    worth = [1 + sum(chances[:k]) - rate * cost[k] for k in range(len(chances) + 1)]
    assert worth[n] >= max(worth) - 1e-9


def test_free_verification_takes_all_and_dear_verification_takes_none() -> None:
    chances = [0.5, 0.25, 0.1]
    assert cost_aware_count(chances, np.ones(4)) == 3
    assert cost_aware_count(chances, np.array([1.0, 10.0, 19.0, 28.0])) == 0
    assert cost_aware_count([], np.ones(1)) == 0
    assert cost_aware_count([0.0, 0.0], np.ones(3)) == 0


KERNELS = pytest.mark.skipif(not native.available(), reason=f"trees are sized by C kernels: {native.reason()}")


@KERNELS
@pytest.mark.parametrize("seed", range(8))
def test_a_sized_tree_is_what_the_rule_would_cut_the_whole_one_to(seed: int) -> None:
    base, hidden, roots, head = random_round(2, 5, seed=seed)
    scorer = ConditionalScorer(base * 3, hidden, roots, head, 16)
    whole = build(scorer, 24)
    costs = [[10 + step * n for n in range(25)] for step in (0.1, 0.6)]
    sized = build(scorer, 24, sizing=Sizing(costs))
    assert whole.given is None
    assert sized.given is not None
    for b in range(2):
        full, own = whole.single(b), sized.single(b)
        count = cost_aware_count(np.exp(full.score).tolist(), costs[b])
        assert own.token == full.token[:count]
        assert own.given == pytest.approx(full.given[:count], rel=1e-4)
    rates = [0.05, 0.2]
    sized = build(scorer, 24, sizing=Sizing(costs, rates=rates))
    for b in range(2):
        full, own = whole.single(b), sized.single(b)
        assert len(own) == cost_aware_count(np.exp(full.score).tolist(), costs[b], rates[b])
    nothing = build(scorer, 24, sizing=Sizing([[1.0, *[100.0 * n for n in range(1, 25)]]] * 2))
    assert nothing.count.tolist() == [0, 0]


@KERNELS
@pytest.mark.parametrize("seed", range(8))
def test_a_sized_tree_is_best_by_its_calibrated_chances(seed: int) -> None:
    base, hidden, roots, head = random_round(1, 5, seed=seed)
    scorer = ConditionalScorer(base * 3, hidden, roots, head, 16)
    calibration = Calibration([(0.8, -0.4), (0.6, -0.2), (1.2, 0.3), (0.9, 0.0), (0.7, -1.0)], [((1, 0), (0, 1))] * 5)
    tree = build(scorer, 60, sizing=Sizing([[1.0] * 61], calibration.mean)).single(0)
    assert len(tree) == 60  # a node costs nothing
    for node, parent in enumerate(tree.parent):
        own = math.log(calibration.acceptance(tree.depth[node], tree.given[node]))
        assert tree.score[node] == pytest.approx(own + (tree.score[parent] if parent >= 0 else 0.0), abs=1e-4)
    assert np.all(np.diff(tree.score) <= 1e-6)


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
