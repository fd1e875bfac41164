"""Requests as clients of the OpenAI API write them, and what they mean here."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dominotree.errors import InvalidRequest
from dominotree.methods import MAX_BUDGET, Drafting
from dominotree.pair import Pair
from dominotree.sampling import LogitsProcessor, SamplingParams
from dominotree.text import Message

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_ALTERNATIVES = 20
MAX_COMPLETION_ALTERNATIVES = 5
DEFAULT_COMPLETION_TOKENS = 16

UNSUPPORTED = frozenset(
    {
        "allowed_token_ids",
        "audio",
        "bad_words",
        "best_of",
        "echo",
        "function_call",
        "functions",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "length_penalty",
        "logits_processors",
        "max_tool_calls",
        "min_tokens",
        "modalities",
        "moderation",
        "prediction",
        "prompt_cache_options",
        "prompt_cache_retention",
        "prompt_logprobs",
        "reasoning_effort",
        "service_tier",
        "store",
        "structured_outputs",
        "suffix",
        "typical_p",
        "use_beam_search",
        "verbosity",
        "web_search_options",
    }
)
"""Fields of this and similar APIs that are refused by name."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
}
"""Values of unsupported fields that ask for nothing, and may therefore be sent."""

TokenId = Annotated[int, Field(ge=0, le=2**31)]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
TokenText = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")]  # one spelling, or a token could be named twice


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class _Body(_Strict):
    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        try:
            json.dumps(data, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("the body holds half of a surrogate pair, which is no text") from None
        return data


class StreamOptions(_Strict):
    """What a stream holds beside the answer."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(_Strict):
    """A schema with the name that the API wants it to have."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    """`text`, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is expected with type json_schema, and only there")
        if self.json_schema is not None and self.json_schema.schema_ is None:
            raise ValueError("json_schema has no schema")
        return self

    @property
    def schema_wanted(self) -> dict[str, Any] | None:
        """The schema that the answer must fit; None for free text."""
        if self.type == "text":
            return None
        return {"type": "object"} if self.json_schema is None else self.json_schema.schema_


class _Generate(_Body):
    """What chat and text completions have in common."""

    prompt_field: ClassVar[str]

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[TokenText, Bias], Field(max_length=4096)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    method: str | None = None
    budget: Annotated[int, Field(ge=0, le=MAX_BUDGET)] | None = None
    candidates: Annotated[int, Field(ge=0, le=2**31)] | None = None
    node_topk: Annotated[int, Field(ge=1, le=2**31)] | None = None
    noise_aware: bool | None = None
    return_decoding_stats: bool | None = None
    return_trace: bool | None = None

    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_empty_wishes(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {
            name: value
            for name, value in data.items()
            if not (name in UNSUPPORTED and (value is None or any(_same(value, v) for v in _NEUTRAL.get(name, ()))))
        }

    @property
    def wants_usage_chunk(self) -> bool:
        """Whether the stream ends with the token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def choices(self) -> int:
        """Answers per prompt."""
        return 1 if self.n is None else self.n

    @property
    def callable_names(self) -> list[str]:
        """Names of the tools that the answer may call."""
        return []

    @property
    def schema_wanted(self) -> dict[str, Any] | None:
        """The schema that the answer must fit; None for free text."""
        return None if self.response_format is None else self.response_format.schema_wanted

    @property
    def schema_field(self) -> str:
        """The field that asks for JSON, as messages name it."""
        return "tools" if self.forced_tools else "response_format"

    @property
    def forced_tools(self) -> list[FunctionTool]:
        """The tools of which the answer must call one; empty where it need not."""
        return []

    def check(self) -> None:
        """Raises `InvalidRequest` for fields that do not go together."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options has no effect without stream")

    @abstractmethod
    def answer_limit(self, context: int) -> int:
        """The most tokens of the answer."""

    @abstractmethod
    def alternatives(self) -> int | None:
        """How many alternatives per token; None where no log-probabilities are wanted."""

    def drafting(self, default: Drafting, pair: Pair) -> Drafting:
        """How the request drafts: `default`'s method where it names none, the pair's budget for another.

        Raises `InvalidRequest` for an option that the method disregards.
        """
        chosen = {
            name: value
            for name in ("method", "budget", "candidates", "node_topk", "noise_aware")
            if (value := getattr(self, name)) is not None
        }
        if "method" not in chosen or chosen["method"] == default.method:
            same = {name: getattr(default, name) for name in ("budget", "candidates", "node_topk", "noise_aware")}
            chosen = {"method": default.method, **same, **chosen}
        drafting = pair.drafting(**chosen)
        options = ("budget", "candidates", "node_topk", "noise_aware")
        drafting.kind.refuse_idle(
            name for name in options if (value := getattr(self, name)) is not None and value is not False
        )
        return drafting

    def sampling(self, choice: int, context: int, processors: Sequence[LogitsProcessor] = ()) -> SamplingParams:
        """How the tokens of a choice are drawn: choice i as a request alone would with `seed + i`."""
        if processors and self.ignore_eos:
            raise InvalidRequest(f"ignore_eos contradicts {self.schema_field}: such answers end by themselves")
        seed = None if self.seed is None else (self.seed + choice + 2**63) % 2**64 - 2**63
        top_k = self.top_k or 0
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, top_k),
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
            seed=seed,
            max_new_tokens=self.answer_limit(context),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=self.alternatives(),
            logits_processors=tuple(processors),
        )


class TextPart(_Strict):
    """A piece of a message's text."""

    type: Literal["text"]
    text: str


class ToolFunction(_Strict):
    """What an assistant called."""

    name: str
    arguments: str | dict[str, Any]


class ToolCall(_Strict):
    """A call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: ToolFunction
    index: int | None = None

    def as_template_input(self) -> dict[str, Any]:
        """What the chat template gets: the arguments as an object, since templates write them as JSON."""
        call, arguments = self.model_dump(exclude_none=True), self.function.arguments
        with suppress(ValueError, RecursionError):
            found = json.loads(arguments) if isinstance(arguments, str) else arguments
            if isinstance(found, dict):
                call["function"]["arguments"] = found
        return call


class ChatMessage(_Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_empty_fields(cls, data: Any) -> Any:
        """Clients send an answer back with all the empty fields it came with."""
        if not isinstance(data, dict):
            return data
        empty = ("refusal", "annotations", "audio", "function_call", "tool_calls")
        return {name: value for name, value in data.items() if value or name not in empty}

    def as_template_input(self) -> Message:
        """What the chat template gets."""
        content = self.content
        if content is None and not self.tool_calls:
            raise InvalidRequest(f"content of a message with role {self.role} is missing")
        message: Message = {
            "role": "system" if self.role == "developer" else self.role,
            "content": "".join(part.text for part in content) if isinstance(content, list) else content,
        }
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        if self.tool_calls:
            message["tool_calls"] = [call.as_template_input() for call in self.tool_calls]
        return message


class FunctionTool(_Strict):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Strict):
    """A tool that the model may use."""

    type: Literal["function"]
    function: FunctionTool


def call_schema(functions: Sequence[FunctionTool]) -> dict[str, Any]:
    """What one call of one of `functions` looks like; raises `InvalidRequest` for parameters that are no object's."""
    calls, tables = [], {}
    for number, function in enumerate(functions):
        parameters = function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
        kind = parameters.get("type", "object")
        if kind != "object":
            raise InvalidRequest(f"tools: the parameters of {function.name} have type {kind!r}; object is expected")
        place = f"tool{number}"
        try:
            tables[place] = _moved(parameters, f"#/$defs/{place}")
        except RecursionError:
            raise InvalidRequest(f"tools: the parameters of {function.name} are nested too deep") from None
        form = {"name": {"const": function.name}, "arguments": {"$ref": f"#/$defs/{place}"}}
        calls.append({"type": "object", "properties": form, "required": list(form), "additionalProperties": False})
    return {"anyOf": calls, "$defs": tables}


_DATA = frozenset({"const", "enum", "default", "examples"})
"""Keywords of a schema that hold data, not schemas."""
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords that hold schemas by names of any kind."""


def _moved(schema: Any, root: str) -> Any:
    """A schema that stands at `root` of another one: its references count from there."""
    if isinstance(schema, list):
        return [_moved(part, root) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[name] = root + value[1:]
        elif name in _NAMED and isinstance(value, dict):
            moved[name] = {each: _moved(part, root) for each, part in value.items()}
        else:
            moved[name] = value if name in _DATA else _moved(value, root)
    return moved


class ChatRequest(_Generate):
    """POST /v1/chat/completions."""

    prompt_field: ClassVar[str] = "messages"

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        """As for all, and for what only chats have."""
        super().check()
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise InvalidRequest("max_tokens and max_completion_tokens differ; give one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs has no effect without logprobs; set logprobs to true")
        named = self.tool_choice is not None and not isinstance(self.tool_choice, str)
        if not named and self.tool_choice not in (None, "none", "auto", "required"):
            raise InvalidRequest(
                f"tool_choice is {self.tool_choice!r}; none, auto, required or "
                '{"type": "function", "function": {"name": ...}} is expected'
            )
        if self.tool_choice not in (None, "none") and not self.tools:
            raise InvalidRequest("tool_choice has no effect without tools")
        if named and not self.forced_tools:
            raise InvalidRequest(
                "tool_choice names no tool of this request; "
                f"one of {', '.join(tool.function.name for tool in self.tools or [])} is expected"
            )
        if self.forced_tools and self.response_format is not None:
            raise InvalidRequest("tool_choice forces a call, whose form response_format cannot change; leave one out")
        if self.parallel_tool_calls is False and self.offered_tools and not self.forced_tools:
            raise InvalidRequest("parallel_tool_calls cannot be turned off here; leave it out")
        clash = {"messages", "tools", "add_generation_prompt"} & set(self.chat_template_kwargs or {})
        if clash:
            raise InvalidRequest(f"chat_template_kwargs cannot set {sorted(clash)[0]}")

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that the chat template is told of."""
        if self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_none=True) for tool in self.tools or []]

    @property
    def forced_tools(self) -> list[FunctionTool]:
        """The tools of which the answer must call one; empty where it need not."""
        functions = [tool.function for tool in self.tools or []]
        match self.tool_choice:
            case "required":
                return functions
            case {"type": "function", "function": {"name": name, **others}, **more} if not others and not more:
                return [function for function in functions if function.name == name]
        return []

    @property
    def schema_wanted(self) -> dict[str, Any] | None:
        """That of a call where one is forced; else as for all."""
        return call_schema(self.forced_tools) if self.forced_tools else super().schema_wanted

    @property
    def callable_names(self) -> list[str]:
        """Those that are offered; none where the answer is JSON of another kind."""
        if not self.forced_tools and self.schema_wanted is not None:
            return []
        return [tool["function"]["name"] for tool in self.offered_tools]

    def answer_limit(self, context: int) -> int:
        """All that the context leaves, unless the request says."""
        return self.max_completion_tokens or self.max_tokens or context

    def alternatives(self) -> int | None:
        """`top_logprobs` where `logprobs` is on."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(_Generate):
    """POST /v1/completions."""

    prompt_field: ClassVar[str] = "prompt"

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    logprobs: Annotated[int, Field(ge=0, le=MAX_COMPLETION_ALTERNATIVES)] | None = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one; raises `InvalidRequest` where there is none."""
        prompt = self.prompt
        if not prompt and not isinstance(prompt, str):
            raise InvalidRequest("prompt is an empty list; give at least one prompt")
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt[0], int):
            return [[int(token) for token in prompt]]
        found: list[str | list[int]] = list(prompt)
        if any(not part and not isinstance(part, str) for part in found):
            raise InvalidRequest("prompt holds an empty list of token ids; give at least one token")
        if len(found) * self.choices > MAX_CHOICES:
            raise InvalidRequest(f"prompt and n ask for {len(found) * self.choices} answers; {MAX_CHOICES} at most")
        return found

    def answer_limit(self, context: int) -> int:
        """Few unless the request says, as clients of this route expect."""
        return self.max_tokens or DEFAULT_COMPLETION_TOKENS

    def alternatives(self) -> int | None:
        """`logprobs`."""
        return self.logprobs


class TokenizeRequest(_Body):
    """POST /tokenize: plain text, or a conversation through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("either prompt or messages is expected")
        if self.messages is None and (self.tools or self.chat_template_kwargs):
            raise ValueError("tools and chat_template_kwargs go with messages")
        return self


class DetokenizeRequest(_Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


def _same(value: Any, neutral: Any) -> bool:
    return type(value) is type(neutral) and bool(value == neutral)
