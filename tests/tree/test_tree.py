"""The tree's arrays, masks and walks."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dominotree.tree.batched import build
from dominotree.tree.tree import Tree, Trees
from tree.tabulated import tabulated


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.lists(st.integers(0, 20), min_size=1, max_size=3), st.booleans())
def test_a_row_sees_the_root_its_ancestors_and_itself(seed, budgets, early_stop):
    trees = build(tabulated(len(budgets), 5, 3, seed=seed), budgets, early_stop=early_stop)
    mask, positions = trees.ancestor_mask(), trees.positions()
    assert mask.shape == (len(budgets), trees.size + 1, trees.size + 1)
    unbounded = Trees(trees.token, trees.parent, trees.depth, trees.score, trees.count)
    assert torch.equal(mask, unbounded.ancestor_mask())
    for b in range(trees.batch):
        tree = trees.single(b)
        for row in range(trees.size + 1):
            node = row - 1
            seen = {row} if node >= len(tree) else {0, *(i + 1 for i in tree.path(node))}
            assert set(mask[b, row].nonzero()[:, 0].tolist()) == seen
            if node < len(tree):
                assert positions[b, row] == len(tree.path(node))


def test_parents_come_before_children_and_scores_fall():
    trees = build(tabulated(2, 6, 8, seed=1), 50)
    assert torch.all(trees.parent < torch.arange(50))
    assert torch.all(trees.score.diff(dim=1) <= 0)


def test_walking_by_tokens():
    tree = Tree(token=[7, 9, 7], parent=[-1, 0, 1], depth=[0, 1, 2], score=[-1.0, -2.0, -3.0])
    assert tree.child_with_token(-1, 7) == 0
    assert tree.child_with_token(-1, 9) is None
    assert tree.child_with_token(0, 9) == 1
    assert tree.child_with_token(1, 7) == 2
    assert tree.path(2) == [0, 1, 2]
    assert tree.path(-1) == []
    assert len(tree) == 3


def test_an_empty_tree_has_only_a_root():
    trees = Trees.empty(2)
    assert trees.ancestor_mask().tolist() == [[[True]], [[True]]]
    assert trees.positions().tolist() == [[0], [0]]
    assert len(trees.single(1)) == 0
    assert Trees.empty(1, size=2).ancestor_mask()[0].tolist() == torch.eye(3, dtype=torch.bool).tolist()


def test_leading_nodes_are_the_tree_of_a_smaller_budget():
    scorer = tabulated(2, 5, 8, seed=4)
    cut, smaller = build(scorer, 30).first(torch.tensor([10, 99])), build(scorer, [10, 30])
    for name in ("token", "parent", "depth", "score", "count"):
        assert torch.equal(getattr(cut, name), getattr(smaller, name)), name
    assert build(scorer, 30).single(0).first(10) == smaller.single(0)


def test_pruning_takes_what_is_below_along_and_leaves_a_tree_that_fits_as_it_is():
    tree = Tree(
        [1, 2, 3, 4, 1], [-1, 0, -1, 1, 2], [0, 1, 0, 2, 1], [-0.1, -0.2, -0.3, -0.4, -0.5], [0.9, 0.8, 0.7, 0.6, 0.5]
    )
    assert tree.pruned(lambda _: True) is tree
    left = tree.pruned(lambda path: 2 not in path)
    assert left == Tree([1, 3, 1], [-1, -1, 1], [0, 0, 1], [-0.1, -0.3, -0.5], [0.9, 0.7, 0.5])
    assert tree.pruned(lambda _: False) == Tree()
