"""Words in training: scored behind the draft vocabulary, labelled by the token alone, measured as decoding has them."""

from __future__ import annotations

import torch

from dominotree.train.batches import make_batch
from dominotree.train.data import Sample
from dominotree.train.evaluate import FrozenTarget, evaluate
from dominotree.train.features import CachedSample
from dominotree.train.model import DrafterModel
from drafters.synthetic import tiny_config

VOCAB, HIDDEN = 96, 32
KNOWN = torch.arange(0, VOCAB, 2)


def frozen(words: int = 8) -> FrozenTarget:
    rows = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
    return FrozenTarget(rows, rows * 2, KNOWN, words)


def test_what_a_pack_scores_is_the_draft_vocabulary_and_then_its_words() -> None:
    scoring = frozen().scoring([torch.tensor([4, 7, 9, 7]), torch.tensor([2, 9, 11])])
    assert scoring.words.tolist() == [7, 9, 11]
    assert torch.equal(scoring.head, frozen().lm_head[[*KNOWN.tolist(), 7, 9, 11]])
    places = {token: int(scoring.draft_ids[token]) for token in (2, 4, 7, 9, 11, 13)}
    assert places == {2: 1, 4: 2, 7: 48, 9: 49, 11: 50, 13: -1}


def test_no_words_where_none_are_wanted() -> None:
    scoring = frozen(words=0).scoring([torch.tensor([4, 7, 9])])
    assert len(scoring.words) == 0
    assert torch.equal(scoring.head, frozen().lm_head[KNOWN])


def sample(tokens: list[int], prompt: int) -> CachedSample:
    length = len(tokens)
    return CachedSample(
        Sample(0, prompt, length - prompt, "kind", 0.0),
        torch.tensor(tokens),
        torch.randn(length, 2 * HIDDEN, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16),
        torch.zeros(length, 3, dtype=torch.int64),
        torch.full((length, 3), 0.2),
    )


def test_a_word_is_labelled_by_itself_and_ends_no_block() -> None:
    config = tiny_config(draft_vocab=48, context_vocab=8)
    text = sample([2, 4, 7, 6, 7, 8, 10, 13, 12, 14], 3)
    scoring = frozen().scoring([text.tokens[:7]])  # 13 is not among the words
    batch = make_batch([text], [torch.tensor([3])], config, scoring.draft_ids, soft_share=0.7)
    assert batch.labels.usable[0].tolist() == [True, True, True, False, False, False]
    assert batch.labels.ids[0, :3, -1].tolist() == [48, 4, 5]
    torch.testing.assert_close(batch.labels.probs[0, :2, -1], torch.tensor([1.0, 0.3]))
    torch.testing.assert_close(batch.labels.probs.sum(-1), torch.ones(1, 6))


class Sure(DrafterModel):
    """Is sure of one token, whatever it sees."""

    token = 0

    def forward(self, blocks: torch.Tensor, anchors: torch.Tensor, context: object) -> torch.Tensor:
        wanted = frozen().lm_head[self.token]
        return wanted.expand(*anchors.shape, self.config.draft_length, -1) * 100

    def correction(self, hidden: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*hidden.shape[:-1], self.config.emb_dim)


def test_a_word_counts_as_proposed_only_behind_where_it_first_stood() -> None:
    model = Sure(tiny_config(draft_vocab=48, context_vocab=8, prefix_len=0))
    model.token = 7
    late = evaluate(model, frozen(), [sample([2, 4, 6, 8, 7, 7, 7, 7], 2)])  # roots 6, 8, 7, 7, 7
    assert late.tau == 5 / 3  # 6, 8: the target says 8, then the first 7; after it all of 7, 7, 7 are drafted
    early = evaluate(model, frozen(), [sample([7, 4, 6, 7, 7, 7, 7, 7], 2)])
    assert early.tau == 5 / 1
    assert evaluate(model, frozen(words=0), [sample([7, 4, 6, 7, 7, 7, 7, 7], 2)]).tau == 1.0
