"""Candidates, their order, and the log-probabilities of the three scorers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dominotree.tree.batched import build
from dominotree.tree.chain import corrected_chain
from dominotree.tree.order import stable_topk, top_candidates
from dominotree.tree.reference import build_reference
from dominotree.tree.scorers import ConditionalScorer, MarginalScorer, StaticScorer
from tree.tabulated import assert_close, random_round


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 2**31),
    st.integers(1, 70),
    st.integers(0, 80),
    st.sampled_from([0.0, 0.3, 3.0]),
    st.booleans(),
)
def test_candidates_are_ordered_by_logit_then_index(seed, vocab, width, quantum, bf16):
    base = torch.randn(2, 3, vocab, generator=torch.Generator().manual_seed(seed))
    if quantum:
        base = (base / quantum).round() * quantum  # also makes -0.0
    base = base.bfloat16() if bf16 else base
    logits, ids = top_candidates(base, width)
    values, order = torch.sort(base.float(), dim=-1, descending=True, stable=True)
    count = min(width, vocab) or vocab
    assert torch.equal(ids, order[..., :count])
    assert torch.equal(logits, values[..., :count])
    assert torch.equal(stable_topk(base.float(), count)[1], ids)


def test_marginal_is_normalised_over_the_whole_vocabulary():
    base = random_round(2, 4).base
    scorer = MarginalScorer(base, 7)
    full = torch.log_softmax(base, dim=-1).gather(-1, scorer.candidates)
    for depth in range(4):
        rows = scorer.log_probs(depth, scorer.root_state()[:, None])
        assert torch.allclose(rows[:, 0], full[:, depth], atol=1e-5)


@pytest.mark.parametrize("prefix_len", [0, 1, 2, 3, 9])
@pytest.mark.parametrize("width", [8, 0])
def test_conditional_corrects_behind_the_prefix_and_normalises_within_the_slice(prefix_len, width):
    base, hidden, roots, head = random_round(2, 4, prefix_len=prefix_len, offsets=1)
    scorer = ConditionalScorer(base, hidden, roots, head, width)
    packed, state = scorer.root_state()[:, None], head.initial_state(roots)
    for depth in range(4):
        ids = scorer.candidates[:, depth]
        if depth < prefix_len:
            expected = torch.log_softmax(base[:, depth], dim=-1).gather(-1, ids)
        else:
            correction = head.correction(head.hidden_part(hidden[:, depth]), state, ids)
            expected = torch.log_softmax(base[:, depth].gather(-1, ids) + correction, dim=-1)
        assert torch.allclose(scorer.log_probs(depth, packed)[:, 0], expected, atol=1e-5)
        for b in (0, 1):
            assert torch.allclose(scorer.log_probs_at(b, depth, packed[b]), expected[b], atol=1e-5)
        assert torch.equal(scorer.tokens[:, depth], head.target_ids(ids))
        state = head.advance(state, scorer.tokens[:, depth, 2])
        packed = scorer.advance(packed, ids[:, 2:3])


def test_static_shares_the_correction_of_the_greedy_path():
    base, hidden, roots, head = random_round(2, 5)
    static, conditional = (kind(base, hidden, roots, head, 8) for kind in (StaticScorer, ConditionalScorer))
    state = conditional.root_state()[:, None]
    for depth in range(5):
        row = conditional.log_probs(depth, state)
        two_lanes = static.log_probs(depth, static.root_state()[:, None].expand(-1, 2, -1))
        assert torch.equal(two_lanes, row.expand(-1, 2, -1))
        state = conditional.advance(state, conditional.candidates[:, depth].gather(1, row[:, 0].argmax(-1, True)))


def test_half_precision_inputs_give_fp32_log_probabilities():
    base, hidden, roots, head = random_round(1, 3)
    scorer = ConditionalScorer(base.bfloat16(), hidden.bfloat16(), roots, head, 8)
    assert scorer.log_probs(2, scorer.root_state()[:, None]).dtype == torch.float32


@pytest.mark.parametrize("width", [16, 0])
def test_each_sequences_corrections_take_its_own_factor(width, monkeypatch):
    base, hidden, roots, head = random_round(3, 5, seed=2)
    scale = torch.tensor([1.0, 0.0, 0.5])
    scorer = ConditionalScorer(base, hidden, roots, head, width, scale)
    expected = build_reference(scorer, 30)
    for early_stop in (True, False):
        assert_close(build(scorer, 30, early_stop=early_stop), expected)
    state = scorer.root_state()
    rows = scorer.log_probs(3, state[:, None])[:, 0]
    for b in range(3):
        assert torch.allclose(scorer.log_probs_at(b, 3, state[b, None]), rows[b], atol=1e-5)
    uncorrected = base[1, 3, scorer.candidates[1, 3]]
    assert torch.allclose(rows[1], torch.log_softmax(uncorrected, -1), atol=1e-5)
    with_kernels = corrected_chain(base, hidden, roots, head, scale=scale)
    monkeypatch.setattr("dominotree.native.available", lambda: False)
    for chain in (with_kernels, corrected_chain(base, hidden, roots, head, scale=scale)):
        assert chain.token[1].tolist() == base[1].argmax(-1).tolist()
