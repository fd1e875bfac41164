"""How well a drafter foresees answers that are known already. Nothing is decoded: the target has run once, before.

Accepted lengths scatter too much to tell a layer that is off by one from the right one on a few answers. The place in
the drafter's list at which the token stands that really followed does tell it, since every depth of every draft
counts, and two settings are compared draft by draft. (Its probability would not do: it also rises for a setting that
only makes the drafter more sure of itself.)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from dominotree.decode import PREFILL_CHUNK
from dominotree.drafters.dflash import Draft, Drafter
from dominotree.targets.base import Target
from dominotree.targets.rows import Segment

STRIDE = 3
"""Drafts begin at every third token; at neighbouring ones they would say almost the same."""


@dataclass(frozen=True)
class KnownAnswer:
    """A prompt and the target's greedy answer to it, with the target's features at all but the last token.

    `features[layer]` is `[len(tokens) - 1, hidden]`, the output of that decoder layer.
    """

    prompt_length: int
    tokens: list[int]
    features: dict[int, torch.Tensor]


def listen(target: Target, prompt: Sequence[int], answer: Sequence[int], layers: Collection[int]) -> KnownAnswer:
    """Runs the target over prompt and answer once and keeps the outputs of `layers`."""
    tokens, wanted = [*prompt, *answer], sorted(layers)
    cache = target.new_cache(1, (len(tokens) + 63) // 64 * 64)
    parts = []
    for start in range(0, len(tokens) - 1, PREFILL_CHUNK):
        chunk = tokens[start : min(start + PREFILL_CHUNK, len(tokens) - 1)]
        out = target.forward(cache, [Segment(0, start, chunk)], feature_layers=wanted, last_only=True)
        cache.commit(0, range(len(chunk)))
        assert out.features is not None
        parts.append(out.features)
    rows = torch.cat(parts).view(len(tokens) - 1, len(wanted), target.hidden_size)
    return KnownAnswer(len(prompt), tokens, {layer: rows[:, i] for i, layer in enumerate(wanted)})


@dataclass(frozen=True)
class Foresight:
    """What a drafter knew of the tokens that followed, an entry for each draft, in an order that all settings share.

    `log_place` `[drafts]` fp64: the logarithm of the place in the drafter's list, 0 for the likeliest token, mean over
    the depths; `accepted` `[drafts]`: leading depths whose likeliest token was right; `covered`: share of the tokens
    that the draft vocabulary holds; `depths`: how many were looked at.
    """

    log_place: torch.Tensor
    accepted: torch.Tensor
    covered: float
    depths: int

    @property
    def tau(self) -> float:
        """Tokens a round of a greedy chain that starts at every draft in turn, the target's own one included."""
        return 1 + float(self.accepted.mean())

    @property
    def place(self) -> float:
        """The geometric mean of the places; 1 is perfect."""
        return math.exp(float(self.log_place.mean()))

    def ahead_of(self, other: Foresight) -> tuple[float, float]:
        """By how much the mean logarithm of the place is lower than `other`'s, and in how many standard errors.

        Drafts that overlap are no independent witnesses: the error is that of the means of groups that do not.
        """
        difference = other.log_place - self.log_place
        size = -(-self.depths // STRIDE)
        groups = torch.stack([group.mean() for group in torch.split(difference, size)])
        error = float(groups.std()) / len(groups) ** 0.5 if len(groups) > 1 else math.inf
        mean = float(difference.mean())
        return mean, mean / error if error > 0 else 0.0


def depths_to_judge(drafter: Drafter) -> int:
    """Depths that a drafter has whichever way its slots are counted."""
    return max(1, drafter.config.block_size - 1)


def starts(answers: Sequence[KnownAnswer], depths: int) -> list[list[int]]:
    """For each answer the positions of the roots to draft from, last first; `depths` tokens follow each."""
    return [list(range(a.prompt_length, len(a.tokens) - depths, STRIDE))[::-1] for a in answers]


@torch.inference_mode()
def foresee(drafter: Drafter, answers: Sequence[KnownAnswer]) -> Foresight:
    """Drafts at many places of known answers, along the tokens that really followed.

    Drafting overwrites the context behind a root, so roots are taken from the last to the first.
    """
    depths = depths_to_judge(drafter)
    cache = drafter.new_cache(len(answers), max(len(answer.tokens) for answer in answers))
    for slot, answer in enumerate(answers):
        features = torch.cat([answer.features[layer] for layer in drafter.feature_layers], dim=-1)
        drafter.extend(cache, [slot], [len(features)], features)
    roots = starts(answers, depths)
    found: list[tuple[tuple[int, int], torch.Tensor, torch.Tensor]] = []
    for step in range(max(map(len, roots))):
        slots = [slot for slot, places in enumerate(roots) if step < len(places)]
        places = [roots[slot][step] for slot in slots]
        for slot, place in zip(slots, places, strict=True):
            cache.lengths[slot] = place
        draft = drafter.draft(cache, slots, [answers[s].tokens[p] for s, p in zip(slots, places, strict=True)])
        followed = [answers[s].tokens[p + 1 : p + 1 + depths] for s, p in zip(slots, places, strict=True)]
        placed, right = _judge(drafter, draft, torch.tensor(followed, device=draft.roots.device))
        found += zip(zip(slots, places, strict=True), placed.cpu(), right.cpu(), strict=True)
    found.sort(key=lambda entry: entry[0])
    stood = torch.stack([placed for _, placed, _ in found])  # [drafts, depths]
    accepted = torch.stack([right for _, _, right in found]).double()
    covered = float((stood <= drafter.config.scored_vocab_size).float().mean())
    return Foresight(stood.double().log().mean(dim=1), accepted, covered, depths)


def _judge(drafter: Drafter, draft: Draft, followed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the tokens that followed `[batch, depths]` stand in the drafter's list, from 1 on, behind its end if it
    cannot draft them; and the number of leading depths `[batch]` whose likeliest token is the right one.
    """
    logits = _logits(drafter, draft, followed)
    index = followed
    if drafter.token_ids is not None:
        index = torch.searchsorted(drafter.token_ids, followed).clamp(max=len(drafter.token_ids) - 1)
        index = index.where(drafter.token_ids[index] == followed, -1)
    own = logits.gather(-1, index.clamp_min(0)[..., None])
    place = torch.where(index < 0, logits.shape[-1] + 1, 1 + (logits > own).sum(dim=-1))
    return place, (place == 1).int().cumprod(dim=1).sum(dim=1)


def _logits(drafter: Drafter, draft: Draft, followed: torch.Tensor) -> torch.Tensor:
    """Logits `[batch, depths, V']`, corrected along the tokens that followed where the drafter has a head for it."""
    depths, head = followed.shape[1], drafter.head
    base = draft.base[:, :depths].float()
    if head is None:
        return base
    states = [head.initial_state(draft.roots)]
    for depth in range(depths - 1):
        states.append(head.advance(states[-1], followed[:, depth]))
    correction = head.correction(head.hidden_part(draft.hidden[:, :depths]), torch.stack(states, dim=1))
    correction[:, : head.prefix_len] = 0
    return base + correction
