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

    `embedding` `[vocab, hidden]`; `head` `[draft_vocab, hidden]`, rows of the draft vocabulary; `draft_ids`
    int64 `[vocab]`, -1 for tokens outside of it. The floating dtype is that of the arithmetic.
    """

    embedding: Tensor
    head: Tensor
    draft_ids: Tensor


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
        for anchors in torch.split(all_anchors(sample, tokens_per_answer), anchors_at_once):
            batch = make_batch([sample], [anchors], config, frozen.draft_ids.cpu(), soft_share=0.0).to(
                frozen.head.device
            )
            matches, base_matches = _matches(model, frozen, batch)
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


def _matches(model: DrafterModel, frozen: FrozenTarget, batch: Batch) -> tuple[Tensor, Tensor]:
    """Whether corrected and base argmax are the true token; both bool `[anchors, depths]`, on the CPU."""
    config = model.config
    blocks, path = block_inputs(frozen, batch, config.block_size, config.mask_token_id)
    with torch.autocast(blocks.device.type, torch.bfloat16, enabled=frozen.head.dtype == torch.bfloat16):
        hidden = model(blocks, batch.anchors, model.context(batch.features.to(frozen.head.dtype)))
        base = (hidden.to(frozen.head.dtype) @ frozen.head.T).flatten(0, 1)
        true = batch.labels.ids[..., -1]
        base_matches = (base.argmax(-1) == true) & batch.labels.usable
        if not config.is_domino:
            return base_matches.cpu(), base_matches.cpu()
        inner = model.correction(hidden, path).flatten(0, 1)
        corrected = base + model.embed_proj[2](inner)
    return ((corrected.argmax(-1) == true) & batch.labels.usable).cpu(), base_matches.cpu()
