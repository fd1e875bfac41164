"""One thread owns the decoder; requests join and leave its batch between rounds."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dominotree.decode import Decoder
from dominotree.errors import DominoTreeError, InvalidRequest
from dominotree.generation import FinishReason, Generation, Request, Stats
from dominotree.machine import set_threads
from dominotree.methods import DEFAULT_CAP, Drafting
from dominotree.pair import Pair, of_no_use
from dominotree.sampling import SamplingParams, TokenLogprobs
from dominotree.serve.errors import QueueFull, TimedOut, Unavailable
from dominotree.serve.metrics import Metrics
from dominotree.serve.sharing import RowShare
from dominotree.serve.tools import FunctionCall
from dominotree.text import TextCodec, TextStream
from dominotree.token_names import TokenNames
from dominotree.trace import Trace

log = logging.getLogger("dominotree.serve")

DEFAULT_CONTEXT = 4096
_IDLE_S = 1.0


@dataclass(frozen=True)
class ShownToken:
    """A token of the answer's text with its log-probabilities; `offset` is where in the text it begins."""

    found: TokenLogprobs
    offset: int


@dataclass(frozen=True)
class Event:
    """What is new of an answer: text, the tokens it is made of (where logprobs were asked for), how it ended.

    `rounds` are new entries of its trace, where one was asked for; `calls` were taken out of the text.
    """

    text: str = ""
    tokens: Sequence[ShownToken] = ()
    rounds: Sequence[dict[str, Any]] = ()
    calls: Sequence[FunctionCall] = ()
    finish_reason: FinishReason | Literal["tool_calls"] | None = None
    error: Exception | None = None

    @property
    def last(self) -> bool:
        """Whether nothing follows."""
        return self.finish_reason is not None or self.error is not None


class Answer:
    """One sequence that a client waits for. Times are seconds on the monotonic clock; the engine thread owns it."""

    def __init__(
        self, call: Call, index: int, request: Request, timeout_s: float | None, trace: Trace | None = None
    ) -> None:
        self.call, self.index, self.trace = call, index, trace
        self.request = request if trace is None else replace(request, recorder=trace.record)
        self.generation: Generation | None = None
        self.submitted = time.monotonic()
        self.deadline = None if timeout_s is None else self.submitted + timeout_s
        self.started: float | None = None
        self.first_token: float | None = None
        self.finished: float | None = None
        self.outcome = ""
        self.fault: Exception | None = None
        self.rounds_seen = self.tokens_seen = 0
        self._shown = 0
        self._logprobs = None if request.sampling.logprobs is None else _TokenOffsets()

    @property
    def stats(self) -> Stats:
        """What it cost; complete once the last event is there."""
        return Stats() if self.generation is None else self.generation.stats

    @property
    def seed(self) -> int | None:
        """The seed it was drawn with."""
        return None if self.generation is None else self.generation.sampler.seed

    def news(self, codec: TextCodec | None) -> Event | None:
        """What came since the last call; None for nothing."""
        generation = self.generation
        assert generation is not None
        text, tokens = generation.take_text(), []
        self._shown += len(text)
        if self._logprobs is not None and codec is not None:
            tokens = self._logprobs.take(codec, generation, self._shown)
        rounds = [] if self.trace is None else self.trace.take(generation)
        reason = generation.finish_reason
        if not (text or tokens or rounds or reason):
            return None
        return Event(text, tokens, rounds, finish_reason=reason)


class Call:
    """What one HTTP request asked for: one answer or several. `events` are (which answer, what is new)."""

    def __init__(
        self, requests: Sequence[Request], timeout_s: float | None, new_trace: Callable[[], Trace] | None = None
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self.admitted: asyncio.Future[None] = self.loop.create_future()
        self.answers = [
            Answer(self, i, request, timeout_s, None if new_trace is None else new_trace())
            for i, request in enumerate(requests)
        ]
        self.cancelled = False

    def post(self, index: int, event: Event) -> None:
        """From the engine thread: hands an event to whoever reads."""
        self._tell(self.events.put_nowait, (index, event))

    def settle(self, error: Exception | None) -> None:
        """From the engine thread: all answers are queued, or none can be."""
        self._tell(_settle, self.admitted, error)

    def _tell(self, function: Callable[..., object], *args: object) -> None:
        with suppress(RuntimeError):  # the loop is gone, and with it the reader
            self.loop.call_soon_threadsafe(function, *args)


def _settle(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


@dataclass
class Limits:
    """What the engine takes at once.

    `max_nodes` bounds the tree of any request, `max_rows` the rows of a pass that several sequences share (None: by
    this machine's profile, or a fixed number), `timeout_s` the seconds of an answer (None: no limit).
    """

    max_batch: int = 8
    max_queue: int = 64
    context: int | None = None
    max_nodes: int = DEFAULT_CAP
    max_rows: int | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        for name, low in (("max_batch", 1), ("max_queue", 0), ("max_rows", 1), ("context", 2)):
            value = getattr(self, name)
            if value is None and name in ("max_rows", "context"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise InvalidRequest(f"{name} is {value!r}; an integer of at least {low} is expected")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise InvalidRequest(f"timeout is {self.timeout_s!r}; a positive number of seconds is expected")


@dataclass
class _Inbox:
    """What the event loop has for the engine thread; guarded by the engine's condition."""

    calls: list[Call] = field(default_factory=list)
    cancels: list[Call] = field(default_factory=list)
    open: int = 0
    closing: bool = False
    end_by: float | None = None
    failure: str | None = None


class Engine:
    """Decodes the requests of all clients, first come, first served; `submit`, read the call's events, or `cancel`.

    What one request does wrong ends that request. When the model itself can no longer run, `ready` turns false and
    every request fails at once with `Unavailable`.
    """

    def __init__(
        self, pair: Pair, drafting: Drafting | None = None, limits: Limits | None = None, metrics: Metrics | None = None
    ) -> None:
        """`drafting` is what requests get that do not choose. Raises `InvalidRequest` for what cannot run here."""
        if pair.codec is None:
            raise InvalidRequest("a server needs the target's tokenizer, and this pair has none")
        self.pair, self.limits, self.metrics = pair, limits or Limits(), metrics or Metrics()
        self.names = TokenNames(pair.codec)
        self.drafting = drafting or pair.drafting()
        drafter = pair.drafter_for(self.drafting.method)
        if drafter is None:  # requests may still ask for what the drafter at hand can do
            drafter = pair.drafter
        self.drafting.check(drafter)
        draft_length = drafter.draft_length if drafter is not None else 0
        wanted = DEFAULT_CONTEXT if self.limits.context is None else self.limits.context
        adaptive = pair._adaptive(drafter) if drafter is not None else None
        self.decoder = Decoder(
            pair.target,
            drafter,
            pair.codec,
            slots=self.limits.max_batch,
            context=min(wanted, pair.context),
            max_nodes=max(self.limits.max_nodes, self.drafting.nodes(draft_length), draft_length),
            adaptive=adaptive,
            share=RowShare.on(pair.target.device, self.limits.max_rows, adaptive.costs if adaptive else None),
        )
        if self.drafting.kind.rule != "fixed" and self.decoder.adaptive is None:
            raise InvalidRequest(
                f"method {self.drafting.method} needs a cost profile of this machine; run `dominotree profile` first"
            )
        self._inbox = _Inbox()
        self._condition = threading.Condition()
        self._answers: list[Answer] = []
        self._warned = False
        self._thread = threading.Thread(target=self._run, name="dominotree-engine", daemon=True)
        self.metrics.slots.set(self.limits.max_batch)
        self.metrics.kv_capacity.set(self.limits.max_batch * self.decoder.context)

    # From the event loop

    def start(self) -> None:
        """Starts the engine thread."""
        self._thread.start()
        self.metrics.up.set(1)

    @property
    def live(self) -> bool:
        """Whether the engine thread runs."""
        return self._thread.is_alive()

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self.live and not self._inbox.closing and self._inbox.failure is None

    @property
    def open(self) -> int:
        """Answers that wait or run."""
        return self._inbox.open

    async def submit(self, requests: Sequence[Request], *, trace: bool = False) -> Call:
        """Queues all of `requests` or none; raises `InvalidRequest`, `QueueFull` or `Unavailable`.

        With `trace` the events tell what every round did.
        """
        room = self.limits.max_batch + self.limits.max_queue
        if len(requests) > room:
            raise InvalidRequest(f"n asks for {len(requests)} answers at once; at most {room} can wait here")
        call = Call(requests, self.limits.timeout_s, self._new_trace if trace else None)
        with self._condition:
            inbox = self._inbox
            if inbox.failure is not None:
                raise Unavailable(inbox.failure)
            if inbox.closing or not self.live:
                raise Unavailable("the server is shutting down")
            if inbox.open + len(requests) > room:
                raise QueueFull(f"all {room} places are taken; try again later")
            inbox.open += len(requests)
            inbox.calls.append(call)
            self._condition.notify()
        try:
            await call.admitted
        except asyncio.CancelledError:
            self.cancel(call)
            raise
        return call

    def cancel(self, call: Call) -> None:
        """Ends what is left of a call before the next round; harmless when nothing is."""
        with self._condition:
            if not call.cancelled:
                call.cancelled = True
                self._inbox.cancels.append(call)
                self._condition.notify()

    def close(self, grace_s: float = 0.0) -> None:
        """Takes no more requests; those at work may finish within `grace_s` seconds, then they end with an error."""
        with self._condition:
            self._inbox.closing = True
            self._inbox.end_by = time.monotonic() + grace_s
            self._condition.notify()

    def join(self, timeout_s: float | None = None) -> None:
        """Waits for the engine thread to end."""
        self._thread.join(timeout_s)

    def _new_trace(self) -> Trace:
        assert self.pair.codec is not None
        return Trace(self.pair.codec, self.names)

    # The engine thread

    def _run(self) -> None:
        set_threads(None)  # a count of threads belongs to the thread that set it
        try:
            while self._next():
                self._expire()
                if self.decoder.busy:
                    self._step()
                self._report()
        except BaseException as error:
            self._give_up(error)
        finally:
            self.metrics.up.set(0)
            self.pair.keep_learned(self.decoder.adaptive)

    def _next(self) -> bool:
        """Takes in what the event loop wants, waiting while there is nothing to do; False when it is time to end."""
        with self._condition:
            inbox = self._inbox
            while not (inbox.calls or inbox.cancels or self._answers or inbox.closing):
                self._condition.wait(_IDLE_S)
            calls, inbox.calls = inbox.calls, []
            cancels, inbox.cancels = inbox.cancels, []
            ended = inbox.closing and not (calls or self._answers)
        for call in calls:
            self._admit(call)
        for call in cancels:
            for answer in [a for a in self._answers if a.call is call]:
                self._end(answer, "cancelled")
        return not ended

    def _admit(self, call: Call) -> None:
        try:
            for answer in call.answers:
                answer.generation = self.decoder.add(answer.request)
        except Exception as error:
            for answer in call.answers:
                if answer.generation is not None:
                    self.decoder.abort(answer.generation)
            self._leave(len(call.answers))
            call.settle(error)
            return
        self._answers += call.answers
        call.settle(None)

    def _expire(self) -> None:
        now, end_by = time.monotonic(), self._inbox.end_by
        for answer in list(self._answers):
            if end_by is not None and now >= end_by:
                self._end(answer, "shutdown", Unavailable("the server is shutting down"))
            elif answer.deadline is not None and now >= answer.deadline:
                self._end(answer, "timeout", TimedOut(f"the answer took longer than {self.limits.timeout_s:g} s"))

    def _step(self) -> None:
        before = time.monotonic()
        try:
            self.decoder.step()
        except Exception as error:
            running = [a for a in self._answers if a.generation is not None]
            at_fault = [a for a in running if a.generation and a.generation.finish_reason == "abort"]
            if not at_fault:  # of the whole batch
                at_fault = [a for a in running if a.generation and a.generation.slot is not None]
            log.warning(
                "request failed",
                exc_info=None if isinstance(error, DominoTreeError) else error,
                extra={"fields": {"error": type(error).__name__, "answers": len(at_fault)}},
            )
            for answer in at_fault:
                self._end(answer, "error", error)
            if not isinstance(error, InvalidRequest):
                self._probe()
        for answer in self._answers:
            if answer.started is None and answer.generation is not None and _has_begun(answer.generation):
                answer.started = before

    def _probe(self) -> None:
        """Lets what is wrong come through if the model cannot run at all."""
        decoder = self.decoder
        alone = Decoder(decoder.target, decoder.drafter, slots=1, context=16, max_nodes=decoder.max_nodes)
        drafting = self.drafting if self.drafting.kind.rule == "fixed" else Drafting("ar")
        alone.run([Request([0], SamplingParams(max_new_tokens=3, ignore_eos=True), drafting)])

    def _report(self) -> None:
        """Hands out what the round brought."""
        now = time.monotonic()
        for answer in list(self._answers):
            generation = answer.generation
            assert generation is not None
            stats = generation.stats
            if stats.new_tokens and answer.first_token is None:
                answer.first_token = now
            self.metrics.progress(
                tokens=stats.new_tokens - answer.tokens_seen,
                accepted=stats.accepted[answer.rounds_seen :],
                nodes=sum(stats.nodes[answer.rounds_seen :]),
            )
            answer.tokens_seen, answer.rounds_seen = stats.new_tokens, len(stats.accepted)
            event = answer.news(self.decoder.codec)
            if event is not None and event.last:
                self._finish(answer, generation.finish_reason or "abort")
            if event is not None:
                answer.call.post(answer.index, event)
        running = [a.generation for a in self._answers if a.generation and a.generation.slot is not None]
        self.metrics.running.set(len(running))
        self.metrics.waiting.set(len(self._answers) - len(running))
        self.metrics.kv_used.set(sum(len(g.tokens) for g in running))

    def _end(self, answer: Answer, outcome: str, error: Exception | None = None) -> None:
        """Ends an answer before its time."""
        if answer.generation is not None:
            self.decoder.abort(answer.generation)
        answer.fault = error
        self._finish(answer, outcome)
        if error is not None:
            answer.call.post(answer.index, Event(error=error))

    def _finish(self, answer: Answer, outcome: str) -> None:
        answer.finished, answer.outcome = time.monotonic(), outcome
        self._answers.remove(answer)
        self._leave(1)
        useless = of_no_use(answer.request.drafting.method, answer.stats)
        if useless is not None and not self._warned:
            self._warned = True
            log.warning(useless)
        self.metrics.finished(answer)

    def _leave(self, answers: int) -> None:
        with self._condition:
            self._inbox.open -= answers

    def _give_up(self, error: BaseException) -> None:
        """The model cannot run any more: everyone hears of it, and so does who comes later."""
        log.critical("engine failed", exc_info=error, extra={"fields": {"error": type(error).__name__}})
        message = "the engine has failed; the server must be restarted"
        with self._condition:
            self._inbox.failure = message
            calls, self._inbox.calls = self._inbox.calls, []
        for call in calls:
            self._leave(len(call.answers))
            call.settle(Unavailable(message))
        for answer in list(self._answers):
            self._finish(answer, "error")
            answer.call.post(answer.index, Event(error=Unavailable(message)))
        self.metrics.running.set(0)
        self.metrics.waiting.set(0)


def _has_begun(generation: Generation) -> bool:
    return generation.slot is not None or generation.stats.new_tokens > 0


class _TokenOffsets:
    """Which tokens the text shown so far is made of, and where each begins in it."""

    def __init__(self) -> None:
        self._stream: TextStream | None = None
        self._waiting: list[ShownToken] = []
        self._known = 0

    def take(self, codec: TextCodec, generation: Generation, shown: int) -> list[ShownToken]:
        """The tokens that begin in the `shown` characters; at the end all but those that only stopped the answer."""
        if self._stream is None:
            self._stream = TextStream(codec)
        for found in generation.logprobs[self._known :]:
            self._waiting.append(ShownToken(found, len(self._stream.text)))
            self._stream.push(found.token)
        self._known = len(generation.logprobs)
        if generation.finish_reason == "length":
            ready = len(self._waiting)
        else:
            ready = sum(token.offset < shown for token in self._waiting)
        taken, self._waiting = self._waiting[:ready], self._waiting[ready:]
        return taken


def describe(answer: Answer) -> dict[str, Any]:
    """Acceptance figures of a finished answer, for replies that ask for them.

    `accepted_histogram[j]`: rounds that accepted j drafted tokens. Counted after any stop: 1 + the tokens of all
    rounds are the answer's tokens.
    """
    stats, drafting = answer.stats, answer.request.drafting
    accepted = list(stats.accepted)  # the engine's thread may be adding to it
    histogram = [0] * max(accepted, default=0)
    for committed in accepted:
        histogram[committed - 1] += 1
    return {
        "method": drafting.method,
        "budget": drafting.most_nodes if drafting.kind.shape == "tree" else None,
        "seed": answer.seed,
        "rounds": len(accepted),
        "mean_accepted": round(stats.mean_accepted, 4),
        "accepted_histogram": histogram,
        "accepted_drafts": sum(accepted) - len(accepted),
        "nodes": sum(stats.nodes),
        "prefill_s": round(stats.prefill_s, 6),
        "decode_s": round(stats.decode_s, 6),
        "tokens_per_s": round(stats.tokens_per_s, 3),
    }
