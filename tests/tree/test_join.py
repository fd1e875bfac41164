"""A continuation joined to a tree: which nodes stay, in which order, with what chances."""

from __future__ import annotations

from math import exp, log

import pytest
from hypothesis import given as examples
from hypothesis import strategies as st

from dominotree.tree.join import join, path_of
from dominotree.tree.tree import Tree

NODES = [  # token, parent, probability below it
    (10, -1, 0.6),
    (11, 0, 0.7),
    (20, -1, 0.3),
    (12, 1, 0.5),
    (13, 0, 0.2),
]


def tree(nodes: list[tuple[int, int, float]] = NODES) -> Tree:
    depth: list[int] = []
    score: list[float] = []
    for _, parent, p in nodes:
        depth.append(depth[parent] + 1 if parent >= 0 else 0)
        score.append(log(p) + (score[parent] if parent >= 0 else 0.0))
    token, parents, given = (list(column) for column in zip(*nodes, strict=True)) if nodes else ([], [], [])
    return Tree(token, parents, depth, score, given).reordered(score)  # type: ignore[arg-type]


def paths(joined: Tree) -> dict[tuple[int, ...], float]:
    """Chances by path."""
    return {tuple(joined.token[i] for i in joined.path(node)): exp(joined.score[node]) for node in range(len(joined))}


def test_a_path_that_no_node_proposes_is_added_and_its_siblings_count_for_less() -> None:
    joined = paths(join(tree(), [30, 31], [0.9, 0.8], size=9))
    assert set(joined) == {*paths(tree()), (30,), (30, 31)}
    assert joined[30, 31] == pytest.approx(0.8 * joined[30,])
    assert joined[10,] == pytest.approx(0.6 * (1 - joined[30,])) and joined[10, 11] == pytest.approx(0.7 * joined[10,])
    assert 0.2 < joined[30,] < 0.9  # less than its chance, since the drafter thinks nothing of it


def test_a_node_that_both_propose_gains_and_brings_along_what_is_below() -> None:
    joined, before = paths(join(tree(), [10, 11, 40], [0.6, 0.6, 0.9], size=9)), paths(tree())
    assert joined[10,] > before[10,] and joined[10, 11] > before[10, 11] > before[10, 11, 12]
    assert joined[20,] < before[20,] and joined[10, 13] < before[10, 13]
    assert (10, 11, 40) in joined
    assert joined[10,] + joined[20,] <= 1


def test_the_best_nodes_stay() -> None:
    assert paths(join(tree(), [30], [1e-4], size=5)).keys() == paths(tree()).keys()
    sure = [0.999] * 4
    assert list(paths(join(tree(), [10, 11, 50, 51], sure, size=4))) == [
        (10,),
        (10, 11),
        (10, 11, 50),
        (10, 11, 50, 51),
    ]
    assert list(paths(join(Tree(), [1, 2, 3], sure[:3], size=2))) == [(1,), (1, 2)]
    assert len(join(tree(), [], [], size=3)) == 3


@examples(
    nodes=st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 5), st.floats(1e-6, 1.0)), max_size=12),
    tokens=st.lists(st.integers(0, 3), max_size=6),
    chance=st.floats(1e-3, 0.999),
    size=st.integers(0, 12),
)
def test_any_join_is_a_tree_in_order(
    nodes: list[tuple[int, int, float]], tokens: list[int], chance: float, size: int
) -> None:
    taken: set[tuple[int, int]] = set()
    kept: list[tuple[int, int, float]] = []
    for token, parent, p in nodes:
        if (edge := (min(parent, len(kept) - 1), token)) not in taken:
            taken.add(edge)
            kept.append((token, edge[0], p))
    joined = join(tree(kept), tokens, [chance] * len(tokens), size)
    assert len(joined) <= size
    assert len(paths(joined)) == len(joined)  # no path twice
    assert joined.score == sorted(joined.score, reverse=True)
    for node, parent in enumerate(joined.parent):
        assert parent < node and joined.depth[node] == (joined.depth[parent] + 1 if parent >= 0 else 0)
        assert joined.score[node] <= (joined.score[parent] if parent >= 0 else 0.0)


def test_a_path_alone_has_the_chances_it_was_given() -> None:
    alone = path_of([7, 8, 9], [0.9, 0.8, 0.5])
    assert paths(alone) == pytest.approx({(7,): 0.9, (7, 8): 0.72, (7, 8, 9): 0.36})
    assert list(alone.given) == [0.0] * 3 and len(path_of([], [])) == 0


def test_siblings_share_what_is_left_as_they_did() -> None:
    joined, before = paths(join(tree(), [10], [0.6], size=9)), paths(tree())
    assert joined[20,] / before[20,] == pytest.approx((1 - joined[10,]) / (1 - before[10,]))
