"""Blocks and labels: aligned with decoding, independent of neighbours; all sequences dealt once an epoch."""

from __future__ import annotations

import pytest
import torch

from dominotree.train.batches import Deck, all_anchors, make_batch, pick_anchors
from dominotree.train.data import Sample
from dominotree.train.features import CachedSample
from drafters.synthetic import tiny_config

VOCAB = 96


def cached(tokens: list[int], prompt: int, top: int = 3) -> CachedSample:
    length = len(tokens)
    soft = torch.arange(length)[:, None] + torch.arange(top)
    return CachedSample(
        Sample(0, prompt, length - prompt, "kind", 0.0),
        torch.tensor(tokens),
        torch.arange(length)[:, None].expand(length, 8).to(torch.bfloat16),
        soft,
        torch.full((length, top), 0.25),
    )


ALL = torch.arange(VOCAB)


@pytest.mark.parametrize("shift_label", [True, False])
def test_depth_d_is_labelled_with_the_token_d_plus_one_after_the_anchor(shift_label: bool) -> None:
    config = tiny_config(shift_label=shift_label, block=4)
    tokens = list(range(10, 22))
    batch = make_batch([cached(tokens, 3)], [torch.tensor([4, 6])], config, ALL, soft_share=0.0)
    depths = config.draft_length
    assert batch.path[0].tolist() == [tokens[4 : 4 + depths], tokens[6 : 6 + depths]]
    assert batch.labels.ids[..., -1].tolist() == [tokens[5 : 5 + depths], tokens[7 : 7 + depths]]
    assert batch.labels.usable.all()


def test_soft_labels_stand_one_before_the_token_they_speak_of_and_sum_to_one() -> None:
    batch = make_batch([cached(list(range(10, 22)), 3)], [torch.tensor([4])], tiny_config(), ALL, soft_share=0.7)
    assert batch.labels.ids[0, :, 0].tolist() == [4, 5, 6, 7, 8, 9]
    torch.testing.assert_close(batch.labels.probs.sum(-1), torch.ones(1, 6))
    torch.testing.assert_close(batch.labels.probs[..., -1], torch.full((1, 6), 0.3))


def test_the_context_holds_no_feature_from_the_last_anchor_on() -> None:
    batch = make_batch([cached(list(range(10, 22)), 3)], [torch.tensor([4, 6])], tiny_config(), ALL, soft_share=0.0)
    assert batch.features[0, :, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_nothing_counts_beyond_the_end_or_from_a_token_outside_the_draft_vocabulary_on() -> None:
    tokens = list(range(10, 22))
    ids = ALL.clone()
    ids[tokens[8]] = -1
    batch = make_batch([cached(tokens, 3)], [torch.tensor([5, 8])], tiny_config(), ids, soft_share=0.0)
    assert batch.labels.usable.int().tolist() == [[1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]]


def test_a_shorter_sequence_is_padded_with_blocks_that_do_not_count() -> None:
    long, short = cached(list(range(10, 22)), 3), cached([10, 11, 12, 13, 14], 2)
    anchors = [torch.tensor([4, 6, 8]), torch.tensor([2])]
    both = make_batch([long, short], anchors, tiny_config(), ALL, soft_share=0.5)
    alone = make_batch([short], anchors[1:], tiny_config(), ALL, soft_share=0.5)
    assert both.labels.usable.view(2, 3, 6)[1].any(-1).tolist() == [True, False, False]
    assert torch.equal(both.labels.usable.view(2, 3, 6)[1, 0], alone.labels.usable[0])
    assert torch.equal(both.labels.probs.view(2, 3, 6, -1)[1, 0], alone.labels.probs[0])


def test_changing_a_later_token_leaves_earlier_blocks_alone() -> None:
    tokens = list(range(10, 22))
    changed = [*tokens[:10], 90, 91]
    anchors = [torch.tensor([3, 4])]
    config = tiny_config(block=4)
    one, two = (make_batch([cached(t, 3)], anchors, config, ALL, soft_share=0.3) for t in (tokens, changed))
    assert torch.equal(one.labels.ids, two.labels.ids)
    assert torch.equal(one.path, two.path)


def test_anchors_lie_inside_the_answer_and_leave_something_to_predict() -> None:
    sample = cached(list(range(10, 22)), 3)
    assert all_anchors(sample).tolist() == list(range(3, 11))
    assert all_anchors(sample, 4).tolist() == [3, 4, 5, 6]
    picked = pick_anchors(sample, 5, torch.Generator().manual_seed(0))
    assert len(set(picked.tolist())) == 5
    assert picked.tolist() == sorted(picked.tolist())
    assert pick_anchors(sample, 99, torch.Generator().manual_seed(0)).tolist() == list(range(3, 11))


def test_an_epoch_deals_sequences_once_in_full_packs_of_like_length() -> None:
    lengths = torch.randint(5, 300, (205,), generator=torch.Generator().manual_seed(0)).tolist()
    deck = Deck(lengths, pack=4, seed=1)
    packs = [deck.draw(3, 205)]
    while deck.state["place"] < len(deck._packs):
        packs.append(deck.draw(3, 205))
    dealt = sorted(place for pack in packs for place in pack)
    assert len(dealt) == len(set(dealt)) == 200
    assert set(dealt) < set(range(3, 205))
    spread = [max(lengths[p] for p in pack) - min(lengths[p] for p in pack) for pack in packs]
    assert sum(spread) / len(spread) < 60


def test_a_resumed_deck_deals_on_even_when_more_is_ready_by_then() -> None:
    lengths = [10] * 50
    deck = Deck(lengths, pack=4, seed=1)
    for _ in range(3):
        deck.draw(2, 30)
    state = dict(deck.state)
    ahead = [deck.draw(2, 30) for _ in range(4)]
    other = Deck(lengths, pack=4, seed=1)
    other.resume(state)
    assert [other.draw(2, 50) for _ in range(4)] == ahead
    assert other.draw(2, 50)
    assert other.state["ready"] == 50
