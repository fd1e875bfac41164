"""Chains: one child per node."""

from __future__ import annotations

import pytest
import torch

from dominotree.drafters.domino import DominoHead
from dominotree.errors import NumericalError
from dominotree.tree.batched import build
from dominotree.tree.chain import base_chain, corrected_chain
from dominotree.tree.scorers import ConditionalScorer, MarginalScorer
from tree.tabulated import random_round, scored_paths, with_words


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


def test_chains_take_words():
    for words in (1, 7):
        base, hidden, roots, head = random_round(3, 5, offsets=1)
        base, head = with_words(base, head, words)
        corrected = corrected_chain(base, hidden, roots, head)
        assert torch.equal(
            corrected.token, build(ConditionalScorer(base, hidden, roots, head, 0), 5, node_topk=1).token
        )
        plain = base_chain(base, d2t=head.d2t, words=words)
        assert torch.equal(plain.token, build(MarginalScorer(base, 1, head.d2t, words), 5).token)
    known = set(head.target_ids(torch.arange(head.vocab_size)).tolist())
    for trees in (corrected, plain):
        assert set(trees.token.flatten().tolist()) - known, "no word was likely enough"


@pytest.mark.parametrize("native", [True, False])
def test_a_word_is_scored_as_a_token_that_the_head_leaves_alone(monkeypatch, native):
    """A head with the words in its own vocabulary, their rows of the correction zero, drafts the same."""
    if not native:
        monkeypatch.setattr("dominotree.native.available", lambda: False)
    base, hidden, roots, head = random_round(3, 5, offsets=1, seed=4)
    base, head = with_words(base, head, 6)
    first = head.vocab_size
    for row in range(3):
        own = list(range(first)) + list(range(first + 6 * row, first + 6 * (row + 1)))
        tokens = head.target_ids(torch.tensor(own))
        proj_out = torch.nn.functional.pad(head.proj_out, (0, 0, 0, 6))
        proj_in = torch.cat([head._hidden_half, head._from_state[:, 3 * head.state_size :]]).T
        gru_hh = head._from_state[:, : 3 * head.state_size].T
        whole = DominoHead(
            head._gru_ih, gru_hh, proj_in, proj_out, head._embed, prefix_len=1, d2t=tokens - torch.arange(len(own))
        )
        part = slice(row, row + 1)
        alone = build(ConditionalScorer(base[part], hidden[part], roots[part], whole, 24), 30)
        chain = corrected_chain(base[part], hidden[part], roots[part], whole)
        assert torch.equal(chain.token[0], corrected_chain(base, hidden, roots, head).token[row])
        together = build(ConditionalScorer(base, hidden, roots, head, 24), 30)
        assert scored_paths(alone, 0).keys() == scored_paths(together, row).keys()


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
