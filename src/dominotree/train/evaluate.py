"""Held-out acceptance, measured without decoding: along a greedy answer, teacher forcing meets the same
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dominotree.train.batches import Batch, all_anchors, make_batch
from dominotree.train.features import CachedSample
from dominotree.train.model import DrafterModel

__all__ = ["FrozenTarget", "HeldOut", "block_inputs", "evaluate", "walk"]


@dataclass(frozen=True)
class FrozenTarget:
    """What training borrows from the target, all on one device.

    `embedding` and `lm_head` `[vocab, hidden]` in the dtype of the arithmetic; `draft_tokens` int64 `[draft_vocab]`,
    the draft vocabulary; `words`, how many tokens of its own a sequence may add to that.
    """

    embedding: Tensor
    lm_head: Tensor
    draft_tokens: Tensor
    words: int = 0

    def scoring(self, texts: Sequence[Tensor]) -> Scoring:
        """What the drafter scores in a pack of sequences, int64 `[length]` each."""
        vocab = self.embedding.shape[0]
        outside = torch.ones(vocab, dtype=torch.bool)
        outside[self.draft_tokens.cpu()] = False
        found = [text[outside[text]].unique()[: self.words] for text in texts]  # type: ignore[no-untyped-call]
        words = torch.cat(found).unique()  # type: ignore[no-untyped-call]
        tokens = torch.cat([self.draft_tokens.cpu(), words])
        draft_ids = torch.full((vocab,), -1)
        draft_ids[tokens] = torch.arange(len(tokens))
        return Scoring(words, draft_ids, self.lm_head[tokens.to(self.lm_head.device)])


@dataclass(frozen=True)
class Scoring:
    """The scored vocabulary of a pack of sequences: the draft vocabulary, then `words`, int64, which it lacks.

    `draft_ids` int64 `[vocab]` are the places of tokens, -1 where not scored, on the CPU; `head` `[draft_vocab + words,
    hidden]`.
    """

    words: Tensor
    draft_ids: Tensor
    head: Tensor


@dataclass(frozen=True)
class HeldOut:
    """Means over sequences: `tau` of the corrected chain and `base_tau` of the base logits' chain (tokens a
    round, the target's own one included); `accuracy` per depth, of positions whose depths above were right.
    """

    tau: float
    base_tau: float
    accuracy: tuple[float, ...]


def block_inputs(frozen: FrozenTarget, batch: Batch, block_size: int, mask_token_id: int) -> tuple[Tensor, Tensor]:
    """Embeddings of blocks `[sequences, anchors, block_size, hidden]` and of their paths (see `Batch`)."""
    path = frozen.embedding[batch.path]
    blocks = frozen.embedding[mask_token_id].repeat(*batch.anchors.shape, block_size, 1)
    blocks[:, :, 0] = path[:, :, 0]
    return blocks, path


def walk(matches: Tensor) -> tuple[int, int]:
    """Rounds and tokens of a chain decoder over an answer.

    `matches` bool `[positions, depths]`: whether the draft made at that root agrees with the answer at each
    depth; roots are consecutive, and the token after the last of them ends the answer.
    """
    accepted = matches.int().cumprod(1).sum(1).tolist()
    place = rounds = 0
    while place < len(accepted):
        place += min(accepted[place] + 1, len(accepted) - place)
        rounds += 1
    return rounds, len(accepted)


@torch.inference_mode()
def evaluate(
    model: DrafterModel,
    frozen: FrozenTarget,
    samples: Sequence[CachedSample],
    *,
    tokens_per_answer: int | None = 128,
    anchors_at_once: int = 64,
) -> HeldOut:
    """Acceptance of `model` on `samples`, over the first `tokens_per_answer` positions of each answer."""
    config = model.config
    taus: list[float] = []
    base_taus: list[float] = []
    reached, right = torch.zeros(config.draft_length), torch.zeros(config.draft_length)
    for sample in samples:
        found, base_found = [], []
        scoring = frozen.scoring([sample.tokens])
        for anchors in torch.split(all_anchors(sample, tokens_per_answer), anchors_at_once):
            batch = make_batch([sample], [anchors], config, scoring.draft_ids, soft_share=0.0).to(frozen.lm_head.device)
            matches, base_matches = _matches(
                model, frozen, scoring.head, batch, _unseen(sample.tokens, scoring, anchors)
            )
            found.append(matches)
            base_found.append(base_matches)
        matches = torch.cat(found)
        above = torch.cat([torch.ones_like(matches[:, :1]), matches[:, :-1]], dim=1).int().cumprod(1).bool()
        reached += above.sum(0)
        right += (above & matches).sum(0)
        for tally, flags in ((taus, matches), (base_taus, torch.cat(base_found))):
            rounds, tokens = walk(flags)
            tally.append(tokens / rounds)
    accuracy = (right / reached.clamp_min(1)).tolist()
    return HeldOut(sum(taus) / len(taus), sum(base_taus) / len(base_taus), tuple(accuracy))


def _unseen(tokens: Tensor, scoring: Scoring, anchors: Tensor) -> Tensor:
    """Whether a word first comes behind an anchor, bool `[anchors, words]`: decoding would not know it there."""
    first = (tokens[None] == scoring.words[:, None]).int().argmax(dim=1) if len(scoring.words) else scoring.words
    return first[None] > anchors[:, None]


def _matches(
    model: DrafterModel, frozen: FrozenTarget, head: Tensor, batch: Batch, unseen: Tensor
) -> tuple[Tensor, Tensor]:
    """Whether corrected and base argmax are the true token; both bool `[anchors, depths]`, on the CPU."""
    config, dtype = model.config, head.dtype
    blocks, path = block_inputs(frozen, batch, config.block_size, config.mask_token_id)
    with torch.autocast(blocks.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        hidden = model(blocks, batch.anchors, model.context(batch.features.to(dtype)))
        base = (hidden.to(dtype) @ head.T).flatten(0, 1)
        base[..., head.shape[0] - unseen.shape[1] :].masked_fill_(unseen[:, None].to(base.device), -torch.inf)
        true = batch.labels.ids[..., -1]
        base_matches = (base.argmax(-1) == true) & batch.labels.usable
        if not config.is_domino:
            return base_matches.cpu(), base_matches.cpu()
        inner = model.correction(hidden, path).flatten(0, 1)
        corrected = base.clone()
        corrected[..., : config.scored_vocab_size] += model.embed_proj[2](inner)
    return ((corrected.argmax(-1) == true) & batch.labels.usable).cpu(), base_matches.cpu()
