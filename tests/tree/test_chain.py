"""Chains: one child per node."""

from __future__ import annotations

import pytest
import torch

from dominotree.errors import NumericalError
from dominotree.tree.batched import build
from dominotree.tree.chain import base_chain, corrected_chain
from dominotree.tree.scorers import ConditionalScorer, MarginalScorer
from tree.tabulated import random_round


def test_the_base_chain_takes_the_largest_logit_of_each_depth():
    base, _, _, head = random_round(2, 5, offsets=1)
    trees = base_chain(base, d2t=head.d2t)
    assert torch.equal(trees.token, head.target_ids(base.argmax(-1)))
    assert trees.parent.tolist() == [[-1, 0, 1, 2, 3]] * 2
    assert trees.depth.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert trees.count.tolist() == [5, 5]
    assert torch.allclose(trees.score, torch.log_softmax(base, -1).amax(-1).cumsum(-1), atol=1e-5)
    assert torch.equal(trees.token, build(MarginalScorer(base, 1, head.d2t), 5).token)


def test_the_corrected_chain_is_the_greedy_path_of_the_full_vocabulary():
    for prefix_len, batch, vocab in ((0, 2, 90), (1, 1, 9000), (3, 3, 90)):  # a large vocabulary takes every thread
        base, hidden, roots, head = random_round(batch, 5, prefix_len=prefix_len, offsets=1, vocab=vocab)
        trees = corrected_chain(base, hidden, roots, head)
        scorer = ConditionalScorer(base, hidden, roots, head, 0)
        greedy = build(scorer, 5, node_topk=1)
        assert torch.equal(trees.token, greedy.token)
        assert torch.equal(trees.parent, greedy.parent)
        assert torch.allclose(trees.score, greedy.score, atol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("depth", [0, 2])
def test_broken_values_are_refused(value, depth):
    base, hidden, roots, head = random_round(2, 4)
    for tensor in (base.clone(), hidden.clone()):
        tensor[1, max(depth, 1) if tensor.shape == hidden.shape else depth, 3] = value
        broken = (tensor, hidden) if tensor.shape == base.shape else (base, tensor)
        with pytest.raises(NumericalError):
            corrected_chain(*broken, roots, head)


def test_chains_can_be_cut():
    base, hidden, roots, head = random_round(3, 5)
    for trees in (
        base_chain(base, max_depth=[0, 2, 9]),
        corrected_chain(base, hidden, roots, head, max_depth=torch.tensor([0, 2, 9])),
    ):
        assert trees.count.tolist() == [0, 2, 5]
        assert trees.parent[1].tolist() == [-1, 0, -1, -1, -1]
        assert trees.single(0).token == []


def test_equal_logits_go_to_the_smallest_token():
    assert base_chain(torch.zeros(1, 2, 9)).token.tolist() == [[0, 0]]
