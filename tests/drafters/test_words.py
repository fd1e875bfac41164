"""Words: tokens beyond the draft vocabulary that a text brings along."""

from __future__ import annotations

import pytest
import torch

from dominotree.decode import Decoder
from dominotree.drafters.words import ContextWords
from dominotree.generation import Request
from dominotree.methods import Drafting
from dominotree.sampling import SamplingParams
from oracle import tiny_drafter
from targets.tiny import tiny_target


def words(size: int) -> ContextWords:
    return ContextWords(
        size,
        frozenset(range(10)),
        lambda ids: ids[:, None].float(),
        lambda ids: -ids[:, None].float(),
        torch.float32,
    )


def outputs(text: ContextWords) -> list[float]:
    """Each word's output row, out of the score of an output of the backbone that is 1."""
    base = torch.zeros(1, 2 + len(text) + 1)
    text.score(torch.ones(1, 1), base, len(text) + 1)
    assert base[0, :2].eq(0).all() and base[0, -1] == -torch.inf
    return base[0, 2:-1].tolist()


def test_words_are_what_the_vocabulary_lacks_each_once() -> None:
    text = words(8)
    assert len(text) == 0
    text.read([3, 9])
    assert len(text) == 0
    text.read([3, 9, 40, 41, 40, 5])
    text.read([3, 9, 40, 41, 40, 5, 42, 41])
    assert text.ids.tolist() == [40, 41, 42]
    assert outputs(text) == [40, 41, 42]
    assert text.inputs.tolist() == [[-40], [-41], [-42]]


def test_the_latest_words_stay() -> None:
    text = words(3)
    text.read([20, 21])
    text.read([20, 21, 22, 23])
    assert sorted(text.ids.tolist()) == [21, 22, 23]
    text.read([20, 21, 22, 23, *range(30, 50)])
    assert sorted(text.ids.tolist()) == [47, 48, 49]
    assert outputs(text) == text.ids.tolist()
    text.read([20, 21, 22, 23, *range(30, 50), 20])  # forgotten, so it is new
    assert sorted(text.ids.tolist()) == [20, 48, 49]


def test_a_draft_scores_the_words_of_each_text_by_the_targets_output_matrix() -> None:
    target = tiny_target("llama")
    drafter = tiny_drafter(target, draft_vocab=40, context_vocab=6)
    assert drafter.token_ids is not None
    outside = [t for t in range(target.vocab_size) if t not in drafter.token_ids.tolist()]
    texts = [drafter.words() for _ in range(3)]
    for text, tokens in zip(texts, (outside[:4], outside[4:6], []), strict=True):
        assert text is not None
        text.read(tokens)
    cache = drafter.new_cache(3, 16)
    draft = drafter.draft(cache, [0, 1, 2], [5, 6, 7], texts=[t for t in texts if t is not None])
    plain = drafter.draft(cache, [0, 1, 2], [5, 6, 7])
    assert draft.base.shape[-1] == 40 + 4
    assert torch.equal(draft.base[..., :40], plain.base)
    assert torch.allclose(draft.base[0, :, 40:], draft.hidden[0] @ target.head_weight()[outside[:4]].T, atol=1e-5)
    assert torch.allclose(draft.base[1, :, 40:42], draft.hidden[1] @ target.head_weight()[outside[4:6]].T, atol=1e-5)
    assert draft.base[1, :, 42:].eq(-torch.inf).all()
    assert draft.base[2, :, 40:].eq(-torch.inf).all()
    fewer = draft.part([2, 1])  # no column that only the one left out has a word for
    assert torch.equal(fewer.base, draft.base[[2, 1], :, :42])
    assert drafter.vocabulary(fewer).words == 2
    assert torch.equal(draft.part([2]).base, plain.base[[2]])
    part = draft.part([2, 0])
    assert torch.equal(part.base, draft.base[[2, 0]])
    columns = drafter.vocabulary(part).tokens(part.base)
    assert columns is not None
    assert columns[1].tolist() == [*drafter.token_ids.tolist(), *outside[:4]]


def test_a_drafter_without_them_has_none() -> None:
    target = tiny_target("llama")
    assert tiny_drafter(target, draft_vocab=40).words() is None
    assert tiny_drafter(target).words() is None


@pytest.mark.parametrize("method", ["dominotree", "domino", "ddtree", "dflash", "static"])
def test_words_are_proposed_the_same_alone_and_in_a_batch(method: str) -> None:
    target = tiny_target("llama")
    drafter = tiny_drafter(target, draft_vocab=12, context_vocab=5)
    prompts = [[30, 31, 32, 5], [60, 61, 62, 63, 64, 65, 66], [7, 8]]
    proposed: dict[int, list[list[int]]] = {}

    def request(i: int) -> Request:
        proposed[i] = []
        return Request(
            prompts[i],
            SamplingParams(max_new_tokens=30, ignore_eos=True),
            Drafting(method, 12),
            recorder=lambda round_: proposed[i].append(round_.tree.token),
        )

    alone = [Decoder(target, drafter, context=64).run([request(i)])[0].tokens for i in range(3)]
    trees = dict(proposed)
    together = Decoder(target, drafter, slots=3, context=64).run([request(i) for i in range(3)])
    assert [g.tokens for g in together] == alone
    assert proposed == trees
    assert drafter.token_ids is not None
    known = set(drafter.token_ids.tolist())
    for i, tokens in enumerate(alone):
        beyond = {token for tree in trees[i] for token in tree} - known
        assert beyond <= set(tokens)
    assert any({token for tree in trees[i] for token in tree} - known for i in range(3))


def test_requests_that_draft_otherwise_share_a_batch_with_words() -> None:
    target = tiny_target("llama")
    drafter = tiny_drafter(target, draft_vocab=12, context_vocab=30)
    prompts = [[30, 31, 32, 33, 34, 35, 36, 5], [60, 61], [7, 8, 90]]
    draftings = [Drafting("dominotree", 12), Drafting("domino"), Drafting("ddtree", 13)]
    sampling = SamplingParams(max_new_tokens=30, ignore_eos=True)
    requests = [Request(p, sampling, d) for p, d in zip(prompts, draftings, strict=True)]
    alone = [Decoder(target, drafter, context=64).run([request])[0] for request in requests]
    together = Decoder(target, drafter, slots=3, context=64).run(requests)
    assert [g.tokens for g in together] == [g.tokens for g in alone]
    assert [g.stats.accepted for g in together] == [g.stats.accepted for g in alone]
