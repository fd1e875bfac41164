"""One request on its way from prompt to answer: its tokens, its text, when it stops, what it cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from dominotree.adaptive import Pace
from dominotree.drafters.words import ContextWords
from dominotree.errors import InvalidRequest
from dominotree.lookup import TextLookup
from dominotree.methods import Drafting
from dominotree.sampling import Sampler, SamplingParams, TokenLogprobs
from dominotree.text import TextCodec, TextStream
from dominotree.tree.tree import Tree

FinishReason = Literal["stop", "length", "abort"]
STAGES = ("draft", "build", "verify", "commit")


@dataclass
class Stats:
    """What decoding cost.

    `accepted[i]` are the tokens round i committed, those behind a stop left out, `nodes[i]` the nodes it verified. The
    draft stage includes encoding the drafter's context.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    accepted: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    stage_ms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    @property
    def rounds(self) -> int:
        """Passes of the target after prefill."""
        return len(self.accepted)

    @property
    def mean_accepted(self) -> float:
        """tau: tokens committed per round; 0 before the first."""
        return sum(self.accepted) / len(self.accepted) if self.accepted else 0.0

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second of decoding; prefill is not counted."""
        return self.new_tokens / self.decode_s if self.decode_s > 0 else 0.0


class Stopwatch:
    """Times a round and its stages for every `Stats` that takes part; what happens between rounds does not count.

    `stage_ms` are the stages of this round so far.
    """

    def __init__(self, stats: Iterable[Stats]) -> None:
        self._stats = list(stats)
        self._started = 0.0
        self.stage_ms = dict.fromkeys(STAGES, 0.0)

    def __enter__(self) -> Stopwatch:
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        spent = time.perf_counter() - self._started
        for stats in self._stats:
            stats.decode_s += spent
            for name, ms in self.stage_ms.items():
                stats.stage_ms[name] += ms

    def stage(self, name: str) -> _Stage:
        """Times a stage."""
        return _Stage(self.stage_ms, name)


class _Stage:
    """Adds the time between enter and exit to what `spent` has under a name."""

    __slots__ = ("_name", "_spent", "_started")

    def __init__(self, spent: dict[str, float], name: str) -> None:
        self._spent, self._name = spent, name

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._spent[self._name] += 1000 * (time.perf_counter() - self._started)


@dataclass(frozen=True)
class Round:
    """What a round did for one sequence. `stage_ms` are those of the whole batch, complete once the round is over."""

    tree: Tree
    path: Sequence[int]
    """The accepted nodes, top down."""
    tokens: Sequence[int]
    """What was committed: the path's tokens and the one that the target added."""
    stage_ms: Mapping[str, float]


@dataclass(frozen=True)
class Request:
    """A prompt as token ids, how to sample, how to draft."""

    prompt: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    drafting: Drafting = field(default_factory=Drafting)
    reuse: bool = False
    """Whether cached keys and values of an earlier sequence with the same beginning may be taken over."""
    stopping: Callable[[Sequence[int]], bool] | None = None
    """Asked after every token, with prompt and answer so far, whether the answer ends with it."""
    recorder: Callable[[Round], None] | None = None
    """Told of every round."""
    prune: Callable[[Sequence[int], Tree], Tree] | None = None
    """Given prompt and answer so far and a drafted tree, the tree without what sampling would never choose.

    Only speed depends on it.
    """


class Generation:
    """A request being decoded. `tokens` holds prompt and answer; the last one is the next round's root."""

    def __init__(
        self, request: Request, codec: TextCodec | None, vocab_size: int, eos: Sequence[int], context: int
    ) -> None:
        """Raises `InvalidRequest` for a prompt that is empty, too long or not of the vocabulary."""
        self.request = request
        prompt = list(request.prompt)
        if not prompt:
            raise InvalidRequest("the prompt has no tokens; give at least one")
        wrong = next((t for t in prompt if not 0 <= t < vocab_size), None)
        if wrong is not None:
            raise InvalidRequest(f"the prompt holds token id {wrong}; ids from 0 to {vocab_size - 1} are expected")
        if len(prompt) >= context:
            raise InvalidRequest(
                f"the prompt has {len(prompt)} tokens and the context is {context}; shorten it or raise --context"
            )
        params = request.sampling
        if params.stop and codec is None:
            raise InvalidRequest("stop strings need a tokenizer; use stop_token_ids")
        beyond = next((t for t in params.stop_token_ids if t >= vocab_size), None)
        if beyond is not None:
            raise InvalidRequest(f"stop_token_ids names {beyond}; ids from 0 to {vocab_size - 1} are expected")
        self.tokens = prompt
        self.sampler = Sampler(params, prompt, vocab_size)
        self.stats = Stats(prompt_tokens=len(prompt))
        self.finish_reason: FinishReason | None = None
        self.error: BaseException | None = None
        """What ended it, where that was an error of its own."""
        self.logprobs: list[TokenLogprobs] = []
        self.slot: int | None = None
        self.prefilled = 0
        self.pace = Pace()
        self.words: ContextWords | None = None
        self.lookup = TextLookup() if request.drafting.kind.lookup else None
        self.unread: list[torch.Tensor] = []
        """Target features of committed tokens that the drafter's context does not hold yet, in their order."""
        self._limit = min(len(prompt) + params.max_new_tokens, context)
        self._stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
        if codec is not None:  # a special token never shows in the text, so its name is looked for as a token
            self._stop_ids |= {token for stop in params.stop if (token := codec.special_id(stop)) is not None}
        self._text = None if codec is None else TextStream(codec, params.stop)

    @property
    def new_tokens(self) -> list[int]:
        """The answer's token ids, the one that stopped it included."""
        return self.tokens[self.stats.prompt_tokens :]

    @property
    def remaining(self) -> int:
        """Tokens that may still be added."""
        return self._limit - len(self.tokens)

    @property
    def most_nodes(self) -> int:
        """Nodes that the next tree may have: the budget, or what a learned one has shown to be enough."""
        drafting = self.request.drafting
        return min(drafting.most_nodes, self.pace.room) if drafting.kind.rule == "calibrated" else drafting.most_nodes

    @property
    def finished(self) -> bool:
        """Whether the answer is complete."""
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        """The answer's text so far, stop strings and stop tokens left out."""
        return "" if self._text is None else self._text.text

    def take_text(self) -> str:
        """Text that is new since the last call, in whole characters, nothing of a stop string in it."""
        return "" if self._text is None else self._text.take(final=self.finished)

    def append(self, token: int) -> bool:
        """Adds a token to the answer; True when the answer ends with it."""
        self.tokens.append(token)
        self.stats.new_tokens += 1
        stopping = self.request.stopping
        by_text = token not in self._stop_ids and self._text is not None and self._text.push(token)
        if token in self._stop_ids or by_text or (stopping is not None and stopping(self.tokens)):
            self.finish("stop")
        elif self.remaining == 0:
            self.finish("length")
        return self.finished

    def finish(self, reason: FinishReason) -> None:
        """Ends the answer."""
        self.finish_reason = reason
        if self._text is not None:
            self._text.finish()
            if reason == "length" and self._text.stopped:  # by a character that the end left incomplete
                self.finish_reason = "stop"
