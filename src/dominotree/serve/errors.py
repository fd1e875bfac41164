"""What a request can be answered with instead of what it asked for, in OpenAI's shape."""

from __future__ import annotations

import re
from typing import Any

from dominotree.errors import DominoTreeError, InvalidRequest


class ApiError(Exception):
    """An error as clients of the OpenAI API expect it; `param` names the field that is to blame."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind
        self.param, self.code, self.headers = param, code, headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """The reply's JSON."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


class QueueFull(DominoTreeError):
    """No room among the requests that wait."""


class Unavailable(DominoTreeError):
    """The server takes no requests: it is shutting down, or its engine has failed."""


class TimedOut(DominoTreeError):
    """An answer took longer than the server allows."""


RETRY_AFTER_S = 1


def api_error(error: Exception, *, prompt_field: str | None = None) -> ApiError:
    """The reply for anything that went wrong; what is not the client's to mend is not told in detail."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return ApiError(
            429, str(error), kind="rate_limit_error", code="queue_full", headers={"Retry-After": str(RETRY_AFTER_S)}
        )
    if isinstance(error, Unavailable):
        return ApiError(503, str(error), kind="server_error", code="unavailable", headers={"Retry-After": "5"})
    if isinstance(error, TimedOut):
        return ApiError(504, str(error), kind="server_error", code="timeout")
    if isinstance(error, InvalidRequest):
        return invalid(str(error), prompt_field=prompt_field)
    return ApiError(
        500, "the request failed inside the server; its log says more", kind="server_error", code="internal"
    )


def invalid(message: str, *, param: str | None = None, prompt_field: str | None = None) -> ApiError:
    """A 400; without `param` the field is told from how the library's own messages begin."""
    code = "context_length_exceeded" if "the context is" in message else "invalid_value"
    return ApiError(400, message, param=param or _field(message, prompt_field), code=code)


_OPENINGS = {"the request drafts": "budget", "logits processors": "logit_bias"}
_PROMPT_WORDS = ("the prompt", "prompt", "the conversation", "message", "content", "the chat template", "this model")


def _field(message: str, prompt_field: str | None) -> str | None:
    for opening, field in _OPENINGS.items():
        if message.startswith(opening):
            return field
    if message.startswith(_PROMPT_WORDS):
        return prompt_field
    first = re.match(r"[a-z_]+", message)
    return first.group() if first and first.group() in _FIELDS else None


_FIELDS = frozenset(
    {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"}
    | {"logit_bias", "seed", "stop", "stop_token_ids", "ignore_eos", "response_format", "stream_options", "n"}
    | {"method", "budget", "candidates", "node_topk", "noise_aware", "max_tokens", "top_logprobs", "tools"}
    | {"tool_choice", "parallel_tool_calls", "chat_template_kwargs"}
)
