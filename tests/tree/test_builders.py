"""The builders agree with each other, node by node, and with the whole trie."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dominotree.errors import InvalidRequest, NumericalError
from dominotree.tree.batched import build
from dominotree.tree.reference import build_reference
from dominotree.tree.scorers import ConditionalScorer, MarginalScorer, StaticScorer
from lesser import FEWER, kernels_without
from tree.tabulated import TabulatedScorer, assert_close, assert_same, random_round, scored_paths, tabulated, with_words

SLOW = settings(max_examples=60, deadline=None)


@st.composite
def cases(draw: st.DrawFn) -> tuple[TabulatedScorer, list[int], int | None, list[int]]:
    batch = draw(st.integers(1, 3))
    levels = draw(st.integers(1, 8))
    width = draw(st.sampled_from([1, 2, 3, 8, 64]))
    scorer = tabulated(
        batch,
        levels,
        width,
        seed=draw(st.integers(0, 2**31)),
        scale=draw(st.sampled_from([0.0, 1e-6, 0.5, 2.0, 6.0, 60.0])),
        quantum=draw(st.sampled_from([0.0, 0.0, 0.25, 1.0, 4.0])),
    )
    budgets = draw(st.lists(st.integers(0, 40) | st.integers(0, 256), min_size=batch, max_size=batch))
    depths = draw(st.lists(st.integers(0, 9), min_size=batch, max_size=batch))
    return scorer, budgets, draw(st.sampled_from([None, 1, 2, 8])), depths


@SLOW
@given(cases())
@example((tabulated(1, 8, 64, seed=0, scale=0.0), [256], None, [8]))
@example((tabulated(2, 3, 8, seed=0, scale=0.0), [100, 9], 8, [3, 2]))
@example((tabulated(1, 8, 1, seed=0), [256], None, [8]))
def test_every_form_builds_the_tree_of_the_reference_heap(case):
    scorer, budgets, node_topk, depths = case
    expected = build_reference(scorer, budgets, node_topk=node_topk, max_depth=depths)
    for early_stop in (True, False):
        trees = build(scorer, budgets, node_topk=node_topk, max_depth=depths, early_stop=early_stop)
        assert_same(trees, expected)
        for b, depth in enumerate(depths):
            assert trees.count[b] <= budgets[b]
            assert all(d < depth for d in trees.single(b).depth)


@SLOW
@given(
    st.integers(0, 2**31),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 400),
    st.sampled_from([0.0, 0.5]),
)
def test_the_tree_is_the_best_nodes_of_the_whole_trie(seed, levels, width, budget, quantum):
    scorer = tabulated(1, levels, width, seed=seed, quantum=quantum)
    trie: dict[tuple[int, ...], float] = {}
    states = {(): (torch.zeros(1, 1, dtype=torch.int64), torch.zeros(()))}
    for depth in range(levels):
        below = {}
        for path, (state, score) in states.items():
            log_prob = scorer.log_probs_at(0, depth, state)
            for place in range(width):
                child = (scorer.advance(state, torch.tensor([place])), score + log_prob[place])
                below[(*path, 1000 + place)] = child
                trie[(*path, 1000 + place)] = float(child[1])
        states = below
    best = sorted(trie.values(), reverse=True)[:budget]
    for trees in (
        build_reference(scorer, budget),
        build(scorer, budget),
        build(scorer, budget, early_stop=False),
    ):
        built = scored_paths(trees, 0)
        assert sorted(built.values(), reverse=True) == best
        assert all(trie[path] == score for path, score in built.items())
        assert all(path[:-1] in built for path in built if len(path) > 1)


def test_ties_fall_by_depth_then_parent_then_place():
    log_prob = torch.full((1, 2, 257, 3), -1.0)
    log_prob[0, 0] = torch.tensor([-1.0, -1.0, -2.0])
    trees = build(TabulatedScorer(log_prob), 8)
    # -1: two nodes of depth 0; then -2: the third of depth 0, three below the first, two below the second
    assert trees.token[0].tolist() == [1000, 1001, 1002, 1000, 1001, 1002, 1000, 1001]
    assert trees.parent[0].tolist() == [-1, -1, -1, 0, 0, 0, 1, 1]
    assert trees.score[0].tolist() == [-1, -1, -2, -2, -2, -2, -2, -2]


def test_log_probabilities_that_differ_can_add_up_to_a_tie():
    log_prob = torch.full((1, 2, 257, 3), -100.0)
    log_prob[0, 0, :, 0] = -64.0
    log_prob[0, 1] = torch.tensor([-1e-7, -2e-7, -0.0])  # below half a step of fp32 at 64
    for node_topk, places in ((None, [0, 1, 2]), (2, [0, 2])):
        for early_stop in (True, False):
            trees = build(TabulatedScorer(log_prob), 4, node_topk=node_topk, early_stop=early_stop)
            assert trees.token[0, 1 : 1 + len(places)].tolist() == [1000 + p for p in places]
            assert_same(trees, build_reference(TabulatedScorer(log_prob), 4, node_topk=node_topk))


def test_a_token_of_probability_zero_is_never_proposed():
    log_prob = torch.full((1, 2, 257, 3), -torch.inf)
    log_prob[..., 1] = 0.0
    for trees in (
        build_reference(TabulatedScorer(log_prob), 9),
        build(TabulatedScorer(log_prob), 9),
        build(TabulatedScorer(log_prob), 9, early_stop=False),
    ):
        assert trees.count.tolist() == [2]
        assert trees.token[0, :2].tolist() == [1001, 1001]


def test_a_budget_beyond_the_trie_takes_all_of_it():
    for early_stop in (True, False):
        assert build(tabulated(1, 3, 2, seed=0), 500, early_stop=early_stop).count.tolist() == [2 + 4 + 8]
        assert build(tabulated(1, 1, 5, seed=0), 500, early_stop=early_stop).count.tolist() == [5]


def test_budget_or_depth_zero_gives_an_empty_tree():
    scorer = tabulated(3, 3, 2, seed=0)
    for early_stop in (True, False):
        assert build(scorer, 0, early_stop=early_stop).count.tolist() == [0, 0, 0]
        trees = build(scorer, [0, 3, 3], max_depth=[3, 0, 1], early_stop=early_stop)
        assert trees.count.tolist() == [0, 0, 2]


@SLOW
@given(
    seed=st.integers(0, 2**31),
    budget=st.integers(0, 96),
    width=st.sampled_from([1, 8, 64, 0]),
    prefix_len=st.integers(0, 3),
    levels=st.integers(1, 8),
    node_topk=st.sampled_from([None, 8]),
    coarse=st.booleans(),
    shape=st.sampled_from([{}, {"hidden": 30, "state": 20, "rank": 19}, {"state": 64, "rank": 32, "vocab": 300}]),
    words=st.sampled_from([0, 1, 9]),
)
def test_real_scorers_give_the_reference_tree_up_to_near_ties(
    seed, budget, width, prefix_len, levels, node_topk, coarse, shape, words
):
    base, hidden, roots, head = random_round(2, levels, seed=seed, prefix_len=prefix_len, offsets=1, **shape)
    if words:
        base, head = with_words(base, head, words)
    base, hidden = (base.bfloat16(), hidden.bfloat16()) if coarse else (base, hidden)
    scorers = (
        ConditionalScorer(base, hidden, roots, head, width),
        StaticScorer(base, hidden, roots, head, width),
        MarginalScorer(base, width, head.d2t, words),
    )
    for scorer in scorers:
        expected = build_reference(scorer, budget, node_topk=node_topk)
        for early_stop in (True, False):
            trees = build(scorer, budget, node_topk=node_topk, early_stop=early_stop)
            if isinstance(scorer, ConditionalScorer):
                assert_close(trees, expected, 1e-4 if shape else 1e-5)  # larger sums round more
            else:
                assert_same(trees, expected)


@pytest.mark.parametrize("left_out", FEWER)
def test_kernels_for_lesser_processors_grow_the_same_trees(left_out):
    with kernels_without(left_out):
        for seed in range(20):
            base, hidden, roots, head = random_round(2, 5, seed=seed, state=20, rank=19, vocab=300)
            scorer = ConditionalScorer(base, hidden, roots, head, 24)
            assert_close(build(scorer, 20), build_reference(scorer, 20))


def test_sequences_do_not_see_each_other():
    base, hidden, roots, head = random_round(3, 5, seed=3)
    together = build(ConditionalScorer(base, hidden, roots, head, 16), [5, 0, 20], max_depth=[5, 5, 2])
    for b, (budget, depth) in enumerate([(5, 5), (0, 5), (20, 2)]):
        own = slice(b, b + 1)
        scorer = ConditionalScorer(base[own], hidden[own], roots[own], head, 16)
        alone = build(scorer, budget, max_depth=depth)
        assert scored_paths(alone, 0).keys() == scored_paths(together, b).keys()


@pytest.mark.parametrize("scorer_type", [ConditionalScorer, StaticScorer, MarginalScorer])
def test_the_fixed_shape_form_traces_whole(scorer_type):
    base, hidden, roots, head = random_round(2, 5, seed=5)

    def whole(base, hidden, roots, budgets, depths):
        if scorer_type is MarginalScorer:
            scorer = MarginalScorer(base, 16)
        else:
            scorer = scorer_type(base, hidden, roots, head, 16)
        trees = build(scorer, budgets, max_depth=depths, size=24, node_topk=8, early_stop=False)
        return trees, trees.ancestor_mask(), trees.positions()

    limits = torch.tensor([24, 7]), torch.tensor([5, 2])
    eager = whole(base, hidden, roots, *limits)
    traced = torch.compile(whole, fullgraph=True, backend="eager")(base, hidden, roots, *limits)
    assert_same(traced[0], eager[0])
    assert torch.equal(traced[1], eager[1])
    assert traced[0].token.shape == (2, 24)
    assert eager[0].count.tolist() == [24, 7]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_logits_are_refused(value):
    base, hidden, roots, head = random_round(2, 4)
    broken = base.clone()
    broken[1, 2, 3] = value
    with pytest.raises(NumericalError):
        MarginalScorer(broken, 8)
    with pytest.raises(NumericalError):
        ConditionalScorer(broken, hidden, roots, head, 0)
    hidden = hidden.clone()
    hidden[0, 1, 0] = value
    with pytest.raises(NumericalError):
        StaticScorer(base, hidden, roots, head, 8)


def test_limits_out_of_range_are_refused():
    scorer = tabulated(2, 3, 2, seed=0)
    for builder in (build, build_reference):
        with pytest.raises(InvalidRequest, match="budgets"):
            builder(scorer, -1)
        with pytest.raises(InvalidRequest, match="2 sequences"):
            builder(scorer, [1, 2, 3])
        with pytest.raises(InvalidRequest, match="node_topk"):
            builder(scorer, 4, node_topk=0)
        with pytest.raises(InvalidRequest, match="max_depth"):
            builder(scorer, 4, max_depth=torch.tensor([1, -2]))
