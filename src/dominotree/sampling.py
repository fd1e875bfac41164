"""From a row of logits to a token, the same token for the same seed however the decoder got to the row.

The token at absolute position p is the argmax, over the tokens that survive the transforms, of
logit / temperature + g, with g Gumbel noise from a counter-based generator keyed by (seed, p, token id).
Plain decoding and every drafting method therefore draw the same tokens. At temperature 0, g is 0.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch

from dominotree import native
from dominotree.errors import InvalidRequest, NumericalError

LogitsProcessor = Callable[[Sequence[int], torch.Tensor], torch.Tensor]
"""`(token ids of prompt and path, logits [vocab] fp32) -> logits [vocab]`."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when to stop.

    Transforms apply in this order: `logits_processors`, `logit_bias`, `repetition_penalty` (tokens of prompt and
    answer), `presence_penalty` and `frequency_penalty` (tokens of the answer), `temperature`, `top_k` (0: off),
    `top_p`, `min_p`. Without a `seed` each request draws a fresh one and reports it. `stop` strings are cut from the
    text; `stop_token_ids` add to the model's own, which `ignore_eos` disregards. `logprobs` asks for the raw
    log-probability of every token and of that many alternatives.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_new_tokens: int = 256
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logits_processors: Sequence[LogitsProcessor] = ()

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name, low, high, kind in _RANGES:
            value = getattr(self, name)
            if value is None and name in ("seed", "logprobs"):
                continue
            right_type = isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool)
            if not right_type or not low <= value <= high or not math.isfinite(value):
                raise InvalidRequest(f"{name} is {value!r}; {_range_text(kind, low, high)} is expected")
        if self.top_p <= 0:
            raise InvalidRequest(f"top_p is {self.top_p!r}; a number above 0 and at most 1 is expected")
        if self.repetition_penalty <= 0:
            raise InvalidRequest(f"repetition_penalty is {self.repetition_penalty!r}; a number above 0 is expected")
        if not _holds(self.stop, lambda text: isinstance(text, str) and text != ""):
            raise InvalidRequest(f"stop is {self.stop!r}; a non-empty string or a list of those is expected")
        if not _holds(self.stop_token_ids, lambda token: isinstance(token, int) and token >= 0):
            raise InvalidRequest(f"stop_token_ids is {self.stop_token_ids!r}; a list of token ids is expected")
        if not _holds(self.logits_processors, callable):
            raise InvalidRequest(f"logits_processors is {self.logits_processors!r}; a list of functions is expected")
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest(f"ignore_eos is {self.ignore_eos!r}; True or False is expected")
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequest(f"logit_bias is {self.logit_bias!r}; a mapping from token ids to numbers is expected")
        for token, bias in self.logit_bias.items():
            if not isinstance(token, int) or not isinstance(bias, (int, float)) or math.isnan(bias):
                raise InvalidRequest(f"logit_bias entry {token!r}: {bias!r} is not a token id with a number")

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the token is just the argmax of the raw logits."""
        return self.temperature == 0 and not self.changes_logits

    @property
    def cuts(self) -> bool:
        """Whether anything leaves tokens out after the temperature."""
        return bool(self.top_k or self.top_p < 1 or self.min_p)

    @property
    def changes_logits(self) -> bool:
        """Whether anything applies before the temperature."""
        return bool(
            self.logits_processors
            or self.logit_bias
            or self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
        )


_INF = float("inf")
_RANGES: tuple[tuple[str, float, float, type], ...] = (
    ("temperature", 0, 1e6, float),
    ("top_k", 0, 2**31, int),
    ("top_p", 0, 1, float),
    ("min_p", 0, 1, float),
    ("repetition_penalty", 0, 1e6, float),
    ("presence_penalty", -1e6, 1e6, float),
    ("frequency_penalty", -1e6, 1e6, float),
    ("seed", -(2**63), 2**64 - 1, int),
    ("max_new_tokens", 1, 2**31, int),
    ("logprobs", 0, 1000, int),
)


def _holds(values: object, right: Callable[[Any], bool]) -> bool:
    """Whether `values` is a list or the like of which every entry is right; a str is none."""
    return isinstance(values, (Sequence, Set)) and not isinstance(values, str) and all(right(v) for v in values)


def _range_text(kind: type, low: float, high: float) -> str:
    noun = "a number" if kind is float else "an integer"
    return f"{noun} from {low:g} to {high:g}"


_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(x: int) -> int:
    """One step of splitmix64's output function, on a 64-bit integer."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    x &= _MASK
    return x - 2**64 if x >= 2**63 else x


def noise_start(seed: int, position: int) -> int:
    """Where the generator starts for a position, unsigned 64 bits."""
    return _mix(_mix(seed + _GOLDEN) + (position + 1) * _GOLDEN)


def gumbel_noise(seed: int, position: int | Sequence[int], token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, fp64, of the shape of `token_ids` (int64), keyed by (seed, position, token id).

    Several positions give a leading axis. splitmix64 over the token ids from a start that mixes seed and position;
    53 bits become a uniform number inside (0, 1). The same key gives the same noise on every device, up to the last
    bits of its logarithm.
    """
    if isinstance(position, int):
        start: int | torch.Tensor = _signed(noise_start(seed, position))
    else:
        starts = [_signed(noise_start(seed, p)) for p in position]
        start = torch.tensor(starts, device=token_ids.device).view(-1, *[1] * token_ids.dim())
    x = (token_ids + 1) * _signed(_GOLDEN) + start
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _signed(0x94D049BB133111EB)
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    bits = ((x >> 11) & 0x1FFFFFFFFFFFFF).clamp(max=2**53 - 2)  # the next number rounds to a uniform of 1
    uniform = (bits.double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))


def fresh_seed() -> int:
    """A seed from the system's own randomness; torch's generators are left alone."""
    return secrets.randbits(63)


@dataclass(frozen=True)
class TokenLogprobs:
    """Raw log-probability of a chosen token and of the most likely ones, `(token id, log-probability)`."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Sampler:
    """Chooses the tokens of one request. Depends on seed, position and history only, so it holds no moving state."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], vocab_size: int) -> None:
        self.params = params
        self.seed = fresh_seed() if params.seed is None else params.seed
        self._prompt = list(prompt)
        for token in params.logit_bias:
            if not 0 <= token < vocab_size:
                raise InvalidRequest(f"logit_bias names token {token}; ids from 0 to {vocab_size - 1} are expected")

    def choose(self, logits: torch.Tensor, path: Sequence[int]) -> int:
        """The token that follows `prompt + path`, given the target's logits `[vocab]` there.

        `path` are the generated tokens so far, those of an unfinished walk down a tree included. Raises
        `NumericalError` for NaN logits and `InvalidRequest` when the transforms leave no token.
        """
        if self.params.changes_logits:
            logits = self._transform(logits.float(), path)
        drawn = self._draw(logits, path)
        if drawn is not None:
            return drawn
        sums, ids = self._sums(logits.float(), path)
        place = int(sums.argmax())
        return place if ids is None else int(ids[place])

    def _draw(self, logits: torch.Tensor, path: Sequence[int]) -> int | None:
        """What `choose` gives for transformed logits, by a C kernel that takes few logarithms; None where it cannot."""
        params = self.params
        if params.temperature == 0 or params.cuts or logits.device.type != "cpu" or not native.available():
            return None
        if logits.dtype not in (torch.float32, torch.bfloat16):
            return None
        logits = logits.contiguous()
        start = noise_start(self.seed, len(self._prompt) + len(path))
        token: int = native.library().dt_draw(
            logits.data_ptr(), logits.dtype == torch.bfloat16, len(logits), params.temperature, start,
            torch.get_num_threads(),
        )  # fmt: skip
        return token if token >= 0 else None  # NaN and infinite logits: see `_sums`

    def decision(self, logits: torch.Tensor, path: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The sums whose argmax `choose` takes, and the token ids they belong to (None: 0 .. vocab-1).

        At temperature 0 the transformed logits, fp32; above it (logit - largest) / temperature + noise, fp64, of the
        tokens that survive the transforms. Raises as `choose` does.
        """
        scores = logits.float()
        return self._sums(self._transform(scores, path) if self.params.changes_logits else scores, path)

    def _sums(self, scores: torch.Tensor, path: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        params = self.params
        highest = scores.max()
        check_best(float(highest))
        if params.temperature == 0:
            return scores, None
        if highest == _INF:  # infinitely likelier than the rest, which a difference of infinities cannot say
            scores, highest = torch.where(scores == _INF, 0.0, -_INF), torch.zeros_like(highest)
        scores = (scores.double() - highest) / params.temperature
        survivors = _survivors(scores, params)
        ids = torch.arange(len(scores), device=scores.device) if survivors is None else survivors
        kept = scores if survivors is None else scores[survivors]
        return kept + gumbel_noise(self.seed, len(self._prompt) + len(path), ids), survivors

    def logprobs(self, logits: torch.Tensor, token: int) -> TokenLogprobs | None:
        """Raw log-probabilities at a row `[vocab]`, if the request asked for them."""
        if self.params.logprobs is None:
            return None
        raw = logits.float().log_softmax(dim=-1)
        values, ids = raw.topk(min(self.params.logprobs, len(raw)))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        return TokenLogprobs(token, float(raw[token]), top)

    def _transform(self, scores: torch.Tensor, path: Sequence[int]) -> torch.Tensor:
        params, shape = self.params, scores.shape
        scores = scores.clone()  # a processor may write into what it gets, and the raw row is still needed
        for processor in params.logits_processors:
            scores = processor([*self._prompt, *path], scores)
            if not isinstance(scores, torch.Tensor) or scores.shape != shape:
                found = list(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
                raise InvalidRequest(f"a logits processor returned {found}; logits of shape {list(shape)} are expected")
        if params.logits_processors:
            scores = scores.float().clone()  # and may keep what it returned
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=scores.device)
            scores[ids] += torch.tensor(list(params.logit_bias.values()), dtype=scores.dtype, device=scores.device)
        if params.repetition_penalty != 1:
            seen = torch.tensor(sorted({*self._prompt, *path}), dtype=torch.int64, device=scores.device)
            old = scores[seen]
            scores[seen] = torch.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
        if (params.presence_penalty or params.frequency_penalty) and path:
            ids, counts = torch.tensor(list(path), device=scores.device).unique(return_counts=True)  # type: ignore[no-untyped-call]
            scores[ids] -= params.presence_penalty + params.frequency_penalty * counts
        return scores


def broken_logits() -> NumericalError:
    """What to raise where a row of logits holds NaN."""
    return NumericalError("the target's logits are NaN; its weights or the dtype are broken (try dtype float32)")


def check_best(score: float) -> None:
    """Raises when the highest score of a row says that no token can be chosen from it."""
    if math.isnan(score):
        raise broken_logits()
    if score == -_INF:
        raise InvalidRequest("logits processors or logit_bias leave no token to choose from")


def _survivors(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor | None:
    """Ids (increasing) that top-k, top-p and min-p leave, for tempered `scores` `[vocab]`; None: all of them."""
    if not params.cuts:
        return None
    keep = torch.ones_like(scores, dtype=torch.bool)
    if 0 < params.top_k < len(scores):
        keep &= scores >= scores.topk(params.top_k).values[-1]
    if params.top_p < 1:
        keep &= _nucleus(scores.masked_fill(~keep, -_INF), params.top_p)
    if params.min_p:
        keep &= scores >= scores.masked_fill(~keep, -_INF).max() + math.log(params.min_p)
    return keep.nonzero().squeeze(1)


def _nucleus(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Whether a token is among the likeliest up to a mass of `top_p`, ties to the smaller id; `scores` `[vocab]`."""
    total = scores.exp().sum()
    # All tokens below this hold less than 1 - top_p together, so that only the others have to be sorted.
    least = math.log((1 - top_p) / len(scores)) + float(total.log()) - 1e-6
    ids = (scores >= least).nonzero().squeeze(1)
    ordered, order = scores[ids].sort(descending=True, stable=True)
    mass = (ordered.exp() / total).cumsum(dim=-1)
    count = 1 + int((mass[:-1] < top_p).sum())
    return torch.zeros_like(scores, dtype=torch.bool).index_fill(0, ids[order[:count]], True)
