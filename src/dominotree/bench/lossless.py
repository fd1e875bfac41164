"""Where two answers to one prompt part, and whether rounding explains it.

A pass over many rows rounds differently from a pass over one, so away from the row-invariant forward a method
may turn a near-tie the other way. A difference is a tie when both tokens were so close that the rounding
measured at that very position can swap them, and a BUG otherwise; where the forward is row-invariant, all are
BUGs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from dominotree.errors import InvalidRequest
from dominotree.generation import Request
from dominotree.methods import Drafting
from dominotree.sampling import Sampler, SamplingParams
from dominotree.targets.rows import Segment

if TYPE_CHECKING:
    from dominotree.pair import Output, Pair

_ORDER_OF_MAGNITUDE = 8
_STRETCH = 256


@dataclass(frozen=True)
class Difference:
    """The first place where an answer parts from plain decoding's.

    `position` counts the answer's tokens from 0; a token is None where its answer had ended. Decisions are
    made on logit / temperature + noise: `margin` is the gap between the two best of these sums in a plain
    forward, `gap` how far the worse of the two tokens lies below the best. `logit_difference` is the largest
    difference of a logit between the method's own forward and the plain one at that position, `rounding` the
    same for an independent pass over many rows. None where it could not be measured.
    """

    position: int
    plain_token: int | None
    other_token: int | None
    kind: Literal["tie", "BUG"]
    reason: str
    margin: float | None = None
    gap: float | None = None
    logit_difference: float | None = None
    rounding: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object; an infinite gap (a token that cannot be drawn) is null."""
        values = asdict(self)
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def first_difference(
    pair: Pair,
    prompt_ids: Sequence[int],
    plain: Output,
    other: Output,
    sampling: SamplingParams,
    *,
    drafting: Drafting | None = None,
) -> Difference | None:
    """Where `other` parts from `plain`, the answer of `ar` to the same prompt and sampling; None: nowhere.

    `drafting` is how `other` was decoded, where more than its method and budget differ from the defaults. At
    the place in question both forwards are made again. Tokens that top-k, top-p or min-p cut in the plain
    forward count as infinitely far from the best. Raises `InvalidRequest` for sampled answers of different
    seeds.
    """
    if sampling.temperature > 0 and plain.seed != other.seed:
        raise InvalidRequest(
            f"the answers were drawn with seeds {plain.seed} and {other.seed}; only answers of one seed can be compared"
        )
    if plain.token_ids == other.token_ids:
        if plain.finish_reason == other.finish_reason:
            return None
        reason = f"equal tokens end with {plain.finish_reason} there and {other.finish_reason} here"
        return Difference(len(plain.token_ids), None, None, "BUG", reason)
    position = common_length(plain.token_ids, other.token_ids)
    if position == len(other.token_ids):
        return Difference(position, plain.token_ids[position], None, "BUG", f"{other.method} ended too early")
    if position == len(plain.token_ids):
        return Difference(position, None, other.token_ids[position], "BUG", f"{other.method} did not end")
    fixed = replace(sampling, seed=plain.seed, logprobs=None)
    place = _Place(pair, list(prompt_ids), plain.token_ids[:position], fixed)
    tokens = plain.token_ids[position], other.token_ids[position]
    return _judge(place, tokens, drafting or Drafting(other.method, other.budget))


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens two answers share."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _judge(place: _Place, tokens: tuple[int, int], drafting: Drafting) -> Difference:
    plain_row = place.decoded(Drafting("ar"))
    other_row = place.decoded(drafting)
    if plain_row is None or other_row is None:
        return Difference(len(place.answer), *tokens, "BUG", "decoding again did not get to this place")
    scores = place.scores(plain_row)
    best = scores.topk(min(2, len(scores))).values.tolist()
    margin = best[0] - best[-1] if len(best) > 1 else math.inf
    gap = best[0] - min(float(scores[token]) for token in tokens)
    moved = _distance(plain_row, other_row)
    rounding = _distance(plain_row, place.in_one_pass())
    kind: Literal["tie", "BUG"] = "BUG"
    reach = 2 * moved / (place.sampling.temperature or 1.0)
    unit = float(plain_row.abs().max()) * torch.finfo(place.pair.target.dtype).eps
    if place.pair.target.row_invariant:
        reason = "the forward is row-invariant, so nothing may differ"
    elif moved > _ORDER_OF_MAGNITUDE * max(rounding, unit):
        reason = f"the logits differ by {moved:.2g}, far more than the {rounding:.2g} that rounding makes"
    elif not gap <= reach:
        reason = f"the tokens lie {gap:.2g} apart, and rounding reaches no further than {reach:.2g}"
    else:
        kind, reason = "tie", f"the tokens lie {gap:.2g} apart, within the {reach:.2g} that rounding reaches"
    return Difference(len(place.answer), *tokens, kind, reason, margin, gap, moved, rounding)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference of finite logits; infinite where only one of the two is finite."""
    finite = a.isfinite() & b.isfinite()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return math.inf
    return float((a - b)[finite].abs().max()) if finite.any() else 0.0


@dataclass(frozen=True)
class _Place:
    """The position behind `prompt + answer`."""

    pair: Pair
    prompt: list[int]
    answer: list[int]
    sampling: SamplingParams

    def decoded(self, drafting: Drafting) -> torch.Tensor | None:
        """Logits `[vocab]` fp32 there while decoding that way, led along the answer; None if not reached."""
        guide = _Guide(len(self.prompt), self.answer)
        sampling = replace(self.sampling, logits_processors=(*self.sampling.logits_processors, guide))
        request = Request(self.prompt, sampling, drafting)
        with closing(self.pair.decoder([request]).stream(request)) as rounds:
            for _ in rounds:
                if guide.row is not None:
                    break
        return guide.row

    def in_one_pass(self) -> torch.Tensor:
        """Logits there from passes over the tokens in long stretches, a cache of their own below them."""
        tokens = self.prompt + self.answer
        target = self.pair.target
        cache = target.new_cache(1, (len(tokens) + 64) // 64 * 64)
        cache.claim(0)
        alone = len(tokens) % _STRETCH == 1  # a last row by itself would show no rounding
        stretch = _STRETCH - alone
        for start in range(0, len(tokens), stretch):
            chunk = tokens[start : start + stretch]
            out = target.forward(cache, [Segment(0, start, chunk)], last_only=True)
            cache.commit(0, range(len(chunk)))
        row = out.logits[-1].float()
        for processor in self.sampling.logits_processors:
            row = processor(tokens, row)
        return row

    def scores(self, row: torch.Tensor) -> torch.Tensor:
        """What the decision is made on, see `decision_scores`."""
        sampler = Sampler(replace(self.sampling, logits_processors=()), self.prompt, len(row))
        return decision_scores(sampler, row, self.answer)


def decision_scores(sampler: Sampler, logits: torch.Tensor, path: Sequence[int]) -> torch.Tensor:
    """The sums whose argmax `Sampler.choose` returns, fp64 `[vocab]` up to a constant; -inf where cut off."""
    sums, ids = sampler.decision(logits, path)
    if ids is None:
        return sums.double()
    return torch.full_like(logits, -math.inf, dtype=torch.float64).index_copy(0, ids, sums)


class _Guide:
    """A logits processor that leads decoding along an answer and keeps the logits behind it."""

    def __init__(self, prompt_length: int, answer: Sequence[int]) -> None:
        self.row: torch.Tensor | None = None
        self._prompt_length, self._answer = prompt_length, list(answer)

    def __call__(self, tokens: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        path = list(tokens[self._prompt_length :])
        if path == self._answer:
            if self.row is None:
                self.row = logits.float().clone()
            return logits
        if len(path) > len(self._answer):
            return logits
        only = torch.full_like(logits, -math.inf)
        only[self._answer[len(path)]] = 0.0
        return only
