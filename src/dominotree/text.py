"""Tokens to text and back: chat prompts, whole characters while streaming, stop strings."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dominotree.errors import InvalidRequest, ModelNotFound

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Message = dict[str, Any]
Prompt = str | Sequence[Message] | Sequence[int]
"""A chat turn, a conversation, or token ids."""

_REPLACEMENT = "\ufffd"

_GENERATION = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")
"""Marks around what an assistant said, which only training looks at; Jinja does not know them."""


class TextCodec:
    """A model folder's tokenizer and chat template."""

    def __init__(
        self, tokenizer: Tokenizer, template: str | None = None, special: dict[str, Any] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self._special = special or {}

    @classmethod
    def from_folder(cls, folder: Path) -> TextCodec:
        """Reads tokenizer.json, its config and the chat template; raises `ModelNotFound` without a tokenizer."""
        from tokenizers import Tokenizer

        file = folder / "tokenizer.json"
        if not file.exists():
            return cls._converted(folder)
        settings: dict[str, Any] = {}
        if (folder / "tokenizer_config.json").exists():
            settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        template = settings.get("chat_template")
        if isinstance(template, list):
            template = next((t["template"] for t in template if t.get("name") == "default"), None)
        if (folder / "chat_template.jinja").exists():
            template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        special = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in settings.items()
            if name.endswith("_token") and value is not None and not isinstance(value, bool)
        }
        try:
            return cls(Tokenizer.from_file(str(file)), template, special)
        except Exception as error:  # the library has no error of its own
            raise ModelNotFound(f"{file} is no tokenizer ({error}); download the model again") from error

    @classmethod
    def _converted(cls, folder: Path) -> TextCodec:
        """A tokenizer in one of the older forms that transformers can convert."""
        from transformers import AutoTokenizer

        try:
            slow = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
            return cls(slow.backend_tokenizer, slow.chat_template, dict(slow.special_tokens_map))
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ModelNotFound(
                f"no usable tokenizer in {folder} ({reason}); tokenizer.json is expected there"
            ) from error

    @property
    def vocab_size(self) -> int:
        """Tokens that the tokenizer knows, added ones included."""
        return int(self.tokenizer.get_vocab_size(with_added_tokens=True))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens, which are no part of any text."""
        return frozenset(i for i, token in self.tokenizer.get_added_tokens_decoder().items() if token.special)

    def special_id(self, text: str) -> int | None:
        """The id of the special token written `text`; None where there is none."""
        token = self.tokenizer.token_to_id(text)
        return token if token in self.special_ids else None

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, with the tokens that the tokenizer itself puts around it."""
        return list(self.tokenizer.encode(text).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def chat(self, messages: Sequence[Message], /, **variables: Any) -> list[int]:
        """Token ids of a conversation with the assistant's turn opened; thinking off unless asked for.

        Raises `InvalidRequest` without a chat template, for malformed messages and where the template refuses.
        """
        text = self.render(messages, **variables)
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def render(self, messages: Sequence[Message], /, **variables: Any) -> str:
        """The conversation as the text that `chat` encodes."""
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        if self.template is None:
            raise InvalidRequest("this model has no chat template; pass raw text (--raw) or token ids")
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
                raise InvalidRequest(f"message {message!r} is not a dict with 'role' and 'content'")
        messages = [{**message, "content": _content(message)} for message in messages]
        if not messages:
            raise InvalidRequest("the conversation is empty; give at least one message")

        def refuse(text: str) -> None:
            raise TemplateError(text)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        environment.filters["tojson"] = lambda x, ensure_ascii=False, **kw: json.dumps(
            x, ensure_ascii=ensure_ascii, **kw
        )
        given = {"enable_thinking": False, "add_generation_prompt": True, **self._special, **variables}
        try:
            template = environment.from_string(_GENERATION.sub(_plain_block, self.template))
            return template.render({**given, "messages": messages})
        except (TemplateError, TypeError, ValueError) as error:
            raise InvalidRequest(f"the chat template refuses this conversation: {error}") from error

    def prompt_ids(self, prompt: Prompt, *, raw: bool = False, system: str | None = None) -> list[int]:
        """Token ids of any prompt: a str is one chat turn unless `raw`, a list of dicts a conversation.

        Raises `InvalidRequest` for what is no prompt, and for options that could have no effect on it.
        """
        if not isinstance(prompt, (str, list, tuple)):
            raise InvalidRequest(
                f"the prompt is a {type(prompt).__name__}; a str, a list of messages or a list of token ids is expected"
            )
        is_chat = not raw and not is_token_ids(prompt)
        if system is not None and not is_chat:
            raise InvalidRequest("a system message has no effect on raw text or token ids; leave it out")
        if raw and not (isinstance(prompt, str) or is_token_ids(prompt)):
            raise InvalidRequest("raw has no effect on a conversation; give plain text, or leave raw out")
        if isinstance(prompt, str):
            ids = self.encode(prompt) if raw else self.chat(_with_system([{"role": "user", "content": prompt}], system))
        elif is_token_ids(prompt):
            ids = [int(token) for token in cast("Sequence[int]", prompt)]
        else:
            ids = self.chat(_with_system(list(cast("Sequence[Message]", prompt)), system))
        if not ids:
            ids = self._opening()
        return ids

    def _opening(self) -> list[int]:
        """What an empty prompt becomes: the beginning-of-text token, where the model has one."""
        token = self._special.get("bos_token")
        found = None if token is None else self.tokenizer.token_to_id(token)
        if found is None:
            raise InvalidRequest("the prompt is empty and the model has no beginning-of-text token; give some text")
        return [found]


def _plain_block(mark: re.Match[str]) -> str:
    before, ends, behind = mark.groups()
    return f"{{%{before} {'endif' if ends else 'if true'} {behind}%}}"


def is_token_ids(prompt: object) -> bool:
    """Whether `prompt` is a list of token ids."""
    return isinstance(prompt, (list, tuple)) and all(isinstance(t, int) and not isinstance(t, bool) for t in prompt)


def _content(message: Message) -> Any:
    """A message's text, text parts joined; None stays where the message calls tools instead of saying something."""
    content = message["content"]
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        kinds = {part.get("type") for part in content} - {"text"}
        if not kinds and all(isinstance(part.get("text"), str) for part in content):
            return "".join(part["text"] for part in content)
    raise InvalidRequest(f"content {content!r} of a message is neither text nor a list of text parts")


def _with_system(messages: list[Message], system: str | None) -> list[Message]:
    return messages if system is None else [{"role": "system", "content": system}, *messages]


class TextStream:
    """Turns tokens into text piece by piece: whole characters only, nothing of a stop string, nothing lost.

    The pieces joined equal the one-shot decoding of the same tokens, cut at the earliest stop string.
    """

    def __init__(self, codec: TextCodec, stop: Sequence[str] = ()) -> None:
        self._codec, self._stop = codec, tuple(stop)
        self._ids: list[int] = []  # without special tokens: a window of text may not begin with one
        self._settled = 0  # tokens whose text is complete
        self._window = 0  # first token of the text that `_shown` counts in; a few tokens before `_settled`
        self._before = ""  # text of the window's settled tokens
        self._text = ""  # all complete characters so far
        self._taken = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """All text so far, cut at a stop string once there was one."""
        return self._text

    def push(self, token: int) -> bool:
        """Adds a token; True once the text contains a stop string, which is dropped with all behind it."""
        if token in self._codec.special_ids:
            return self.stopped
        self._ids.append(token)
        piece = self._codec.decode(self._ids[self._window :])[len(self._before) :]
        whole = piece.rstrip(_REPLACEMENT)
        if whole and whole == piece:
            self._window, self._settled = self._settled, len(self._ids)
            self._before = self._codec.decode(self._ids[self._window :])
        else:
            self._before += whole
        return self._add(whole)

    def finish(self) -> None:
        """No more tokens: characters left incomplete appear as the one-shot decoding shows them."""
        if not self.stopped:
            decoded = self._codec.decode(self._ids[self._window :])
            piece, self._before = decoded[len(self._before) :], decoded
            self._add(piece)

    def take(self, *, final: bool = False) -> str:
        """The text since the last call; while running, what may begin a stop string is held back."""
        end = len(self._text) if final or self.stopped else len(self._text) - self._held()
        piece, self._taken = self._text[self._taken : end], max(self._taken, end)
        return piece

    def _add(self, piece: str) -> bool:
        """Appends, and cuts at the stop string that is complete first (of several the longest)."""
        known, text = len(self._text), self._text + piece
        starts = [(text.find(stop, max(0, known - len(stop) + 1)), stop) for stop in self._stop]
        found = [(at + len(stop), at) for at, stop in starts if at >= 0]
        self._text = text[: min(found)[1]] if found else text
        self.stopped = self.stopped or bool(found)
        return self.stopped

    def _held(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = 0
        for text in self._stop:
            for n in range(min(len(text) - 1, len(self._text)), longest, -1):
                if self._text.endswith(text[:n]):
                    longest = n
                    break
        return longest
