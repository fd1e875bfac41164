"""Answers as clients of the OpenAI API read them: whole, or chunk by chunk."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from dominotree import __version__
from dominotree.serve.engine import Answer, Event, ShownToken, describe
from dominotree.serve.tools import FunctionCall
from dominotree.token_names import TokenNames

Json = dict[str, Any]
FINGERPRINT = f"dominotree-{__version__}"


def dumps(value: object) -> bytes:
    """Compact JSON; half a surrogate pair, which UTF-8 cannot hold, is escaped."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def usage(answers: Sequence[Answer], choices: int) -> Json:
    """Token counts of a call; each prompt counts once, however many choices it has."""
    firsts = answers[::choices]
    prompt = sum(len(answer.request.prompt) for answer in firsts)
    completion = sum(answer.stats.new_tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(answer.stats.reused_tokens for answer in firsts)},
    }


class Writer(ABC):
    """Writes the answers of one call; the two routes differ in what a choice looks like."""

    id_prefix = ""
    whole = ""
    chunk = ""

    def __init__(self, model: str, names: TokenNames, *, show_decoding: bool, usage_chunk: bool) -> None:
        self._names, self._show_decoding, self._usage_chunk = names, show_decoding, usage_chunk
        self.id = self.id_prefix + secrets.token_hex(12)
        self._head = {"created": int(time.time()), "model": model, "system_fingerprint": FINGERPRINT}

    def reply(self, answers: Sequence[Answer], events: Sequence[Sequence[Event]], counts: Json) -> Json:
        """The whole reply; `events[i]` are all of answer i."""
        choices = []
        for answer, parts in zip(answers, events, strict=True):
            text = "".join(event.text for event in parts)
            tokens = [token for event in parts for token in event.tokens]
            calls = [call for event in parts for call in event.calls]
            choice = {
                "index": answer.index,
                **self._full(text, calls),
                "logprobs": self._logprobs(tokens) if answer.request.sampling.logprobs is not None else None,
                "finish_reason": parts[-1].finish_reason,
            }
            if answer.trace is not None:
                choice["trace"] = [entry for event in parts for entry in event.rounds]
            choices.append(self._with_decoding(choice, answer))
        return {"id": self.id, "object": self.whole, **self._head, "choices": choices, "usage": counts}

    def chunks(self, answer: Answer, event: Event, *, first: bool) -> Iterator[Json]:
        """The chunks that an event becomes."""
        reason = event.finish_reason
        wanted = answer.request.sampling.logprobs is not None
        if first and (opening := self._opening()) is not None:
            yield self._chunk([{"index": answer.index, **opening, "logprobs": None, "finish_reason": None}])
        if event.text or event.tokens or event.rounds or event.calls:
            piece = {
                "index": answer.index,
                **self._piece(event.text, event.calls),
                "logprobs": self._logprobs(event.tokens) if wanted else None,
                "finish_reason": None,
            }
            yield self._chunk([{**piece, "trace": event.rounds} if event.rounds else piece])
        if reason is not None:
            last = {"index": answer.index, **self._closing(), "logprobs": None, "finish_reason": reason}
            yield self._chunk([self._with_decoding(last, answer)])

    def usage_chunk(self, counts: Json) -> Json | None:
        """The chunk behind all others, where it was asked for."""
        return {**self._chunk([]), "usage": counts} if self._usage_chunk else None

    def _chunk(self, choices: list[Json]) -> Json:
        made = {"id": self.id, "object": self.chunk, **self._head, "choices": choices}
        return {**made, "usage": None} if self._usage_chunk else made

    def _with_decoding(self, choice: Json, answer: Answer) -> Json:
        return {**choice, "decoding": describe(answer)} if self._show_decoding else choice

    @abstractmethod
    def _full(self, text: str, calls: Sequence[FunctionCall]) -> Json: ...

    @abstractmethod
    def _opening(self) -> Json | None: ...

    @abstractmethod
    def _piece(self, text: str, calls: Sequence[FunctionCall]) -> Json: ...

    @abstractmethod
    def _closing(self) -> Json: ...

    @abstractmethod
    def _logprobs(self, tokens: Sequence[ShownToken]) -> Json: ...


class ChatWriter(Writer):
    """The form of chat completions."""

    id_prefix = "chatcmpl-"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def _full(self, text: str, calls: Sequence[FunctionCall]) -> Json:
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": [_call(call) for call in calls]}
        return {"message": message}

    def _opening(self) -> Json:
        return {"delta": {"role": "assistant", "content": ""}}

    def _piece(self, text: str, calls: Sequence[FunctionCall]) -> Json:
        if not calls:
            return {"delta": {"content": text}}
        called = {"tool_calls": [{"index": call.index, **_call(call)} for call in calls]}
        return {"delta": {"content": text, **called} if text else called}

    def _closing(self) -> Json:
        return {"delta": {}}

    def _logprobs(self, tokens: Sequence[ShownToken]) -> Json:
        content = [
            {
                **self._entry(token.found.token, token.found.logprob),
                "top_logprobs": [self._entry(*alternative) for alternative in token.found.top],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> Json:
        raw = self._names.bytes_of(token)
        return {"token": self._names.text_of(token), "logprob": finite(logprob), "bytes": list(raw)}


class CompletionWriter(Writer):
    """The form of text completions."""

    id_prefix = "cmpl-"
    whole = chunk = "text_completion"

    def _full(self, text: str, calls: Sequence[FunctionCall]) -> Json:
        return {"text": text}

    def _opening(self) -> None:
        return None

    def _piece(self, text: str, calls: Sequence[FunctionCall]) -> Json:
        return {"text": text}

    def _closing(self) -> Json:
        return {"text": ""}

    def _logprobs(self, tokens: Sequence[ShownToken]) -> Json:
        name = self._names.unique_text_of
        return {
            "tokens": [name(token.found.token) for token in tokens],
            "token_logprobs": [finite(token.found.logprob) for token in tokens],
            "top_logprobs": [self._alternatives(token) for token in tokens if token.found.top],
            "text_offset": [token.offset for token in tokens],
        }

    def _alternatives(self, token: ShownToken) -> Json:
        name, found = self._names.unique_text_of, token.found
        top = {name(other): finite(logprob) for other, logprob in found.top}
        return {**top, name(found.token): finite(found.logprob)}


def _call(call: FunctionCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def finite(logprob: float) -> float:
    """JSON has no infinity: what is impossible gets a very low number, as clients of this API know it."""
    return max(logprob, -9999.0)
