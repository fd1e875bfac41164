"""From cached sequences to batches of blocks: anchors, paths and labels, aligned exactly as decoding uses
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dominotree.drafters.config import DrafterConfig
from dominotree.train.features import CachedSample
from dominotree.train.loss import Labels

__all__ = ["Batch", "Deck", "all_anchors", "make_batch", "pick_anchors"]


@dataclass(frozen=True)
class Batch:
    """Blocks of several sequences, padded to the longest context.

    `features` `[sequences, length, width]`; `anchors` int64 `[sequences, anchors]`; `path` int64
    `[sequences, anchors, draft_length]`: the tokens from the anchor's on, where path[d] is the last one known
    when depth d is drafted; `labels` of `sequences * anchors` blocks.
    """

    features: Tensor
    anchors: Tensor
    path: Tensor
    labels: Labels

    def to(self, device: str | torch.device) -> Batch:
        """The same batch on `device`."""
        labels = self.labels
        return Batch(
            self.features.to(device),
            self.anchors.to(device),
            self.path.to(device),
            Labels(labels.ids.to(device), labels.probs.to(device), labels.usable.to(device)),
        )


def all_anchors(sample: CachedSample, limit: int | None = None) -> Tensor:
    """Every position of the answer that decoding may have as its root: int64, increasing, at most `limit`.

    The last token of an answer is none: nothing follows it.
    """
    first, end = sample.sample.prompt_length, sample.sample.length - 1
    return torch.arange(first, end if limit is None else min(end, first + limit))


def pick_anchors(sample: CachedSample, count: int, generator: torch.Generator) -> Tensor:
    """`count` anchors of the answer, increasing; fewer, when the answer has fewer."""
    places = all_anchors(sample)
    return places[torch.randperm(len(places), generator=generator)[:count].sort().values]


def make_batch(
    samples: Sequence[CachedSample],
    anchors: Sequence[Tensor],
    config: DrafterConfig,
    draft_ids: Tensor,
    *,
    soft_share: float,
) -> Batch:
    """Blocks at `anchors` (one increasing int64 tensor a sequence) of `samples`.

    `draft_ids` int64 `[vocab]` gives each token's draft id, -1 where it has none. Labels are `soft_share` of
    the target's distribution over the draft vocabulary and the rest on the true token, all of it where that is a word
    of the sequence's own (ids from the draft vocabulary's size on). Sequences with fewer anchors than the most
    repeat their first one, unusable.
    """
    depths, width = config.draft_length, max(len(places) for places in anchors)
    length = max(int(places[-1]) for places in anchors)
    features = torch.zeros(len(samples), length, samples[0].features.shape[1], dtype=samples[0].features.dtype)
    roots = torch.zeros(len(samples), width, dtype=torch.int64)
    path = torch.zeros(len(samples), width, depths, dtype=torch.int64)
    top = samples[0].soft_ids.shape[1]
    ids = torch.zeros(len(samples), width, depths, top + 1, dtype=torch.int64)
    probs = torch.zeros(len(samples), width, depths, top + 1)
    usable = torch.zeros(len(samples), width, depths, dtype=torch.bool)
    for i, (sample, places) in enumerate(zip(samples, anchors, strict=True)):
        count, end = len(places), len(sample.tokens)
        known = min(int(places[-1]), end)
        features[i, :known] = sample.features[:known]
        roots[i] = places[0]
        roots[i, :count] = places
        at = roots[i][:, None] + torch.arange(depths)  # position of the last known token, [width, depths]
        inside = at + 1 < end
        path[i] = sample.tokens[at.clamp_max(end - 1)]
        true = draft_ids[sample.tokens[(at + 1).clamp_max(end - 1)]]
        usable[i, :count] = ((true >= 0) & inside).cumprod(1).bool()[:count]
        soft_row = at.clamp_max(end - 1)
        ids[i, ..., :top], ids[i, ..., top] = sample.soft_ids[soft_row], true.clamp_min(0)
        soft = sample.soft_probs[soft_row]
        share = soft_share * (true < config.scored_vocab_size)
        probs[i, ..., :top] = share[..., None] * soft / soft.sum(-1, keepdim=True).clamp_min(1e-6)
        probs[i, ..., top] = 1 - share
    blocks = len(samples) * width
    labels = Labels(ids.view(blocks, depths, -1), probs.view(blocks, depths, -1), usable.view(blocks, depths))
    return Batch(features, roots, path, labels)


class Deck:
    """The order in which training visits sequences: packs of similar length, each sequence once an epoch,
    but for a few that would not fill a pack.

    An epoch covers what the cache holds when it begins, so that training can start while the cache is filled.
    `state` is all there is to resume.
    """

    def __init__(self, lengths: Sequence[int], pack: int, seed: int) -> None:
        self._lengths, self._pack, self._seed = lengths, pack, seed
        self.state = {"epoch": -1, "first": 0, "ready": 0, "place": 0}
        self._packs: list[list[int]] = []

    def resume(self, state: dict[str, int]) -> None:
        """Go on from a saved `state`."""
        self.state = dict(state)
        self._packs = self._deal() if state["epoch"] >= 0 else []

    def draw(self, first: int, ready: int) -> list[int]:
        """The next pack; `first` to `ready` are the sequences that a new epoch may use."""
        if self.state["place"] >= len(self._packs):
            self.state = {"epoch": self.state["epoch"] + 1, "first": first, "ready": ready, "place": 0}
            self._packs = self._deal()
        self.state["place"] += 1
        return self._packs[self.state["place"] - 1]

    def _deal(self) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self.state["epoch"])
        count = self.state["ready"] - self.state["first"]
        shuffled = (torch.randperm(count, generator=generator) + self.state["first"]).tolist()
        window = 16 * self._pack
        packs = []
        for start in range(0, count, window):
            near = sorted(shuffled[start : start + window], key=lambda place: self._lengths[place])
            packs += [near[i : i + self._pack] for i in range(0, len(near), self._pack)]
        if len(packs) > 1:  # a smaller batch would have compiled layers compiled again
            packs = [pack for pack in packs if len(pack) == self._pack]
        return [packs[i] for i in torch.randperm(len(packs), generator=generator).tolist()]
