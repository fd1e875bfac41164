"""Calls of tools in what a model writes: found while the text comes, as the model's chat template has them written.

`hermes`: JSON between `<tool_call>` and `</tool_call>`, anywhere in the text (Hermes, Qwen). `llama`: the answer is
nothing but JSON objects, `<|python_tag|>` before them or not (Llama 3). What is not a well-formed call of a tool that
was offered is text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dominotree.errors import InvalidRequest
from dominotree.text import TextCodec

if TYPE_CHECKING:
    from dominotree.serve.engine import Event

TOOL_FORMATS = ("auto", "hermes", "llama", "none")

_OPEN, _CLOSE, _TAG = "<tool_call>", "</tool_call>", "<|python_tag|>"
_BLOCK = re.compile(r'<tool_call>((?:"(?:\\.|[^"\\])*+"|[^"<])*+)(</tool_call>|\Z)', re.DOTALL)
"""A call; marks inside its JSON's strings are none."""
_SEPARATORS = re.compile(r"[\s;]*")
_OBJECT_BEGINS = re.compile(r'\{\s*("|\Z)')


@dataclass(frozen=True)
class FunctionCall:
    """A call of a tool; `arguments` is a JSON object as text."""

    index: int
    id: str
    name: str
    arguments: str


def tool_format(wanted: str, codec: TextCodec) -> str:
    """How the model writes its calls: what is `wanted`, or for "auto" what its chat template shows.

    Raises `InvalidRequest` for a format that is unknown.
    """
    if wanted not in TOOL_FORMATS:
        raise InvalidRequest(f"tool format {wanted!r} is unknown; one of {', '.join(TOOL_FORMATS)} is expected")
    if wanted != "auto":
        return wanted
    template = codec.template or ""
    if _OPEN in template and not re.search(r"<function=|<arg_key>", template):  # others put no JSON there
        return "hermes" if codec.special_id(_OPEN) is None else "llama"  # special tokens never show in the text
    shows_objects = re.search(r'\\?"name\\?": function name, \\?"parameters\\?"', template)
    return "llama" if _TAG in template or shows_objects else "none"


class ToolReader:
    """Parts one answer into its text and its calls. However the text is cut into events, the parts joined are the same.

    A call is told when it is complete; what may become one is held back. White space around calls is dropped.
    """

    def __init__(self, form: str, offered: Collection[str]) -> None:
        """`form` is `hermes` or `llama`, `offered` the names of the tools."""
        self._find: Callable[[bool], str] = self._between_marks if form == "hermes" else self._bare_objects
        self._offered = frozenset(offered)
        self._pending = ""  # not decided yet
        self._space = ""  # behind the text so far; a call may follow
        self._calls: list[FunctionCall] = []
        self._told = 0
        self._is_text = False

    def read(self, event: Event) -> Event:
        """The same event with the calls taken out of its text; an answer that ends by itself ends with them."""
        if event.error is not None:
            return event
        self._pending += event.text
        text = self._find(event.last)
        if event.last and not self._calls:
            text += self._space
        new, self._told = self._calls[self._told :], len(self._calls)
        reason = "tool_calls" if self._calls and event.finish_reason == "stop" else event.finish_reason
        return replace(event, text=text, calls=new, finish_reason=reason)

    def _between_marks(self, last: bool) -> str:
        text = ""
        while (at := self._pending.find(_OPEN)) >= 0:
            text += self._show(self._pending[:at])
            self._pending = self._pending[at:]
            block = _BLOCK.match(self._pending) if last or _CLOSE in self._pending else None
            if not last and (block is None or not block[2]):
                return text
            if block is not None and self._call(block[1]):
                self._pending = self._pending[block.end() :]
            else:
                text += self._show(_OPEN)
                self._pending = self._pending[len(_OPEN) :]
        ready = len(self._pending) - (0 if last else _overlap(self._pending, _OPEN))
        text += self._show(self._pending[:ready])
        self._pending = self._pending[ready:]
        return text

    def _bare_objects(self, last: bool) -> str:
        while not self._is_text:
            at = _end_of_separators(self._pending)
            if self._pending.startswith(_TAG, at):
                at = _end_of_separators(self._pending, at + len(_TAG))
            rest = self._pending[at:]
            if not last and (not rest or _TAG.startswith(rest)):
                return ""
            if last and not rest and self._calls:
                self._pending = ""
                return ""
            end = _end_of_object(rest)
            if end is None and not last and _OBJECT_BEGINS.match(rest):
                return ""
            if end is not None and self._call(rest[:end]):
                self._pending = rest[end:]
            else:
                self._is_text = True
        ready, self._pending = self._pending, ""
        return self._show(ready)

    def _show(self, text: str) -> str:
        """What can be shown with `text`, but for the white space at its end."""
        if not text.strip():
            self._space += text
            return ""
        whole = self._space + text
        shown = whole.rstrip()
        self._space = whole[len(shown) :]
        return shown

    def _call(self, text: str) -> bool:
        """Whether `text` is a call; keeps it, and drops the white space before it."""
        found = _read_call(text)
        if found is None or found[0] not in self._offered:
            return False
        self._calls.append(FunctionCall(len(self._calls), "call_" + secrets.token_hex(12), *found))
        self._space = ""
        return True


def _read_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call in JSON; the arguments may be an object, or one written as a string."""
    try:
        found = json.loads(text)
        if not isinstance(found, dict) or not isinstance(found.get("name"), str):
            return None
        arguments = found.get("arguments", found.get("parameters"))
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(arguments, dict):
            return None
        return found["name"], json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None


def _end_of_separators(text: str, start: int = 0) -> int:
    found = _SEPARATORS.match(text, start)
    assert found is not None
    return found.end()


def _end_of_object(text: str) -> int | None:
    """Where the JSON object that `text` begins with ends; None while it is incomplete, or is none."""
    if not text.startswith("{") or "}" not in text:
        return None
    try:
        return json.JSONDecoder().raw_decode(text)[1]
    except (ValueError, RecursionError):
        return None


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
