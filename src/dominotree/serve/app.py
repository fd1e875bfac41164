"""The routes."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import Response

from dominotree import __version__, native
from dominotree.errors import InvalidRequest
from dominotree.generation import Request as Decoding
from dominotree.methods import METHODS, Drafting
from dominotree.pair import Pair
from dominotree.serve.engine import Call, Engine, Event, Limits, describe
from dominotree.serve.errors import ApiError, api_error, invalid
from dominotree.serve.gate import DEFAULT_MAX_BODY, Gate
from dominotree.serve.grammar import Grammars
from dominotree.serve.protocol import (
    UNSUPPORTED,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from dominotree.serve.replies import ChatWriter, CompletionWriter, Writer, dumps, usage
from dominotree.serve.static import add_page, page_paths
from dominotree.serve.stream import DONE, ClientGone, EventStream, event, unless_gone
from dominotree.serve.tools import ToolReader, tool_format

log = logging.getLogger("dominotree.serve")

T = TypeVar("T")

CLIENT_GONE = 499
_TEXT_THREADS = 2
"""One more than one, so that a long text does not hold up short ones; no more, since the allocator keeps for every
thread the memory that the longest text took there, and since they share the processor with the engine."""
_ROUTES = (
    *("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}", "/tokenize", "/detokenize"),
    *("/chat/completions", "/completions", "/models", "/models/{model}"),
    *("/methods", "/health", "/health/live", "/health/ready", "/metrics"),
)


@dataclass(frozen=True)
class Settings:
    """How the server presents itself and whom it serves. `max_body` in bytes, `grace_s` for what runs at shutdown.

    `hosts` are the names by which clients may call it, beside localhost and addresses in numbers; "*" is any.
    `tool_format` is how the model writes calls of tools, one of `TOOL_FORMATS`; "auto": as its chat template shows.
    """

    model_name: str | None = None
    api_key: str | None = None
    max_body: int = DEFAULT_MAX_BODY
    grace_s: float = 10.0
    log_prompts: bool = False
    page: bool = True
    hosts: Sequence[str] = ()
    tool_format: str = "auto"

    def __post_init__(self) -> None:
        if self.api_key is not None and not self.api_key.strip():
            raise InvalidRequest("the API key is empty; give a text, or leave it out")
        if self.api_key is not None and self.api_key != self.api_key.strip():
            raise InvalidRequest("the API key begins or ends with white space, which clients cannot send; remove it")
        if self.model_name is not None and not self.model_name.strip():
            raise InvalidRequest("the model's name is empty; give a text, or leave it out")
        if any(not name.strip() for name in self.hosts):
            raise InvalidRequest("a host is empty; a name or an address is expected")
        if not 0 <= self.grace_s < math.inf:
            raise InvalidRequest(f"grace is {self.grace_s}; seconds of at least 0 are expected")
        if self.max_body < 1024:
            raise InvalidRequest(f"max_body is {self.max_body}; at least 1024 bytes are expected")


def create_app(
    pair: Pair, drafting: Drafting | None = None, limits: Limits | None = None, settings: Settings | None = None
) -> FastAPI:
    """The application; its engine is `app.state.engine`, which runs from startup to shutdown."""
    settings = settings or Settings()
    engine = Engine(pair, drafting, limits)
    service = Service(engine, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        engine.close()
        await asyncio.to_thread(engine.join, 30.0)

    app = FastAPI(title="dominotree", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.engine = engine
    app.state.settings = settings
    app.add_exception_handler(RequestValidationError, _refuse_validation)
    app.add_exception_handler(HTTPException, _refuse_http)
    app.add_exception_handler(ApiError, _refuse)
    for prefix in ("/v1", ""):  # clients are told addresses with and without it
        openai = APIRouter(prefix=prefix, include_in_schema=bool(prefix))
        openai.add_api_route("/chat/completions", service.chat, methods=["POST"], response_model=None)
        openai.add_api_route("/completions", service.complete, methods=["POST"], response_model=None)
        openai.add_api_route("/models", service.models, methods=["GET"])
        openai.add_api_route("/models/{model:path}", service.model, methods=["GET"])
        app.include_router(openai)
    app.add_api_route("/tokenize", service.tokenize, methods=["POST"], response_model=None)
    app.add_api_route("/detokenize", service.detokenize, methods=["POST"], response_model=None)
    app.add_api_route("/methods", service.methods, methods=["GET"])
    app.add_api_route("/health", service.health, methods=["GET"], response_model=None)
    app.add_api_route("/health/live", service.health_live, methods=["GET"], response_model=None)
    app.add_api_route("/health/ready", service.health_ready, methods=["GET"], response_model=None)
    app.add_api_route("/metrics", service.metrics, methods=["GET"], response_model=None)
    page = page_paths() if settings.page else {}
    if settings.page:
        add_page(app)
    app.add_middleware(
        Gate,
        api_key=settings.api_key,
        max_body=settings.max_body,
        metrics=engine.metrics,
        routes=[*_ROUTES, *page],
        open_paths=page,
        hosts=settings.hosts,
    )
    native.rest()  # the engine's thread computes from now on
    return app


class Service:
    """What the routes do."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        codec = engine.pair.codec
        assert codec is not None
        self._codec = codec
        self._workers = ThreadPoolExecutor(_TEXT_THREADS, thread_name_prefix="dominotree-text")
        self._tool_format = tool_format(settings.tool_format, codec)
        target = engine.pair.target
        self._grammars = Grammars(codec, target.vocab_size, target.eos_token_ids)
        self._model = settings.model_name or PurePath(engine.pair.name).name or "dominotree"
        self._since = int(time.time())

    # OpenAI's routes

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """An answer to a conversation."""
        self._check_model(body.model)
        try:
            body.check()
            prompt = await self._apart(
                self._chat_ids, body.messages, body.offered_tools, body.chat_template_kwargs or {}
            )
            requests = await self._apart(self._requests, body, [prompt])
            call = await self.engine.submit(requests, trace=bool(body.return_trace))
        except Exception as error:
            raise api_error(error, prompt_field="messages") from error
        return await self._answer(ChatWriter, body, call, request)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """A continuation of text or token ids, or of several."""
        self._check_model(body.model)
        try:
            body.check()
            prompts = await self._apart(self._text_ids, body.prompts())
            requests = await self._apart(self._requests, body, prompts)
            call = await self.engine.submit(requests, trace=bool(body.return_trace))
        except Exception as error:
            raise api_error(error, prompt_field="prompt") from error
        return await self._answer(CompletionWriter, body, call, request)

    async def models(self) -> dict[str, Any]:
        """The one model that is served."""
        return {"object": "list", "data": [self._card()]}

    async def model(self, model: str) -> dict[str, Any]:
        """The model, if it is the one that is served."""
        if not model:  # `/v1/models/`
            return await self.models()
        self._check_model(model)
        return self._card()

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._model,
            "object": "model",
            "created": self._since,
            "owned_by": "dominotree",
            "max_model_len": self.engine.decoder.context,
        }

    # Ours

    async def methods(self) -> dict[str, Any]:
        """The methods that requests can choose here, what they get that do not, and the most nodes of a tree."""
        engine, default, offered = self.engine, self.engine.drafting, []
        for method in METHODS.values():
            drafting = default if method.name == default.method else engine.pair.drafting(method.name)
            try:
                drafting.check(engine.decoder.drafter)
            except InvalidRequest:
                continue
            if method.rule == "fixed" or engine.decoder.adaptive is not None:
                budget = drafting.most_nodes if method.shape == "tree" else None
                offered.append(
                    {
                        "name": method.name,
                        "summary": method.summary,
                        "shape": method.shape,
                        "drafts": method.drafts,
                        "budget": budget,
                    }
                )
        return {
            "method": default.method,
            "budget": default.most_nodes if default.kind.shape == "tree" else None,
            "max_budget": engine.decoder.max_nodes,
            "methods": offered,
        }

    async def tokenize(self, body: TokenizeRequest) -> Response:
        """Token ids of text or of a conversation."""
        self._check_model(body.model)

        def work() -> Response:
            if body.messages is not None:
                tools = [tool.model_dump(exclude_none=True) for tool in body.tools or []]
                found = self._chat_ids(body.messages, tools, body.chat_template_kwargs or {})
            else:
                found = self._codec.encode(body.prompt or "")
            return _json({"tokens": found, "count": len(found), "max_model_len": self.engine.decoder.context})

        try:
            return await self._apart(work)
        except Exception as error:
            raise api_error(error, prompt_field="messages" if body.messages else "prompt") from error

    async def detokenize(self, body: DetokenizeRequest) -> Response:
        """Text of token ids, special tokens left out."""
        self._check_model(body.model)
        size = self.engine.pair.target.vocab_size
        wrong = next((token for token in body.tokens if token >= size), None)
        if wrong is not None:
            raise invalid(f"tokens holds {wrong}; ids from 0 to {size - 1} are expected", param="tokens")
        return _json({"prompt": await self._apart(self._codec.decode, body.tokens)})

    async def health(self) -> Response:
        """Whether the engine lives, and whether it takes requests: 503 where not."""
        live, ready = self.engine.live, self.engine.ready
        return _json({"live": live, "ready": ready}, 200 if ready else 503)

    async def health_live(self) -> Response:
        """200 while the engine lives."""
        live = self.engine.live
        return _json({"live": live}, 200 if live else 503)

    async def health_ready(self) -> Response:
        """200 while requests are taken."""
        ready = self.engine.ready
        return _json({"ready": ready}, 200 if ready else 503)

    async def metrics(self) -> Response:
        """For Prometheus."""
        return Response(self.engine.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    # From a request to what is decoded

    async def _apart(self, work: Callable[..., T], *args: object) -> T:
        """What may take long, such as the tokens of a long text, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, work, *args)

    def _check_model(self, wanted: str | None) -> None:
        if wanted is not None and wanted not in (self._model, self.engine.pair.name):
            raise ApiError(
                404, f"model {wanted!r} is not served here; {self._model} is", param="model", code="model_not_found"
            )

    def _chat_ids(
        self, messages: Sequence[ChatMessage], tools: list[dict[str, Any]], variables: dict[str, Any]
    ) -> list[int]:
        if tools and "tools" not in (self._codec.template or ""):
            raise InvalidRequest("tools have no place in this model's chat template; leave them out")
        given = {**variables, "tools": tools} if tools else variables
        return self._codec.chat([message.as_template_input() for message in messages], **given)

    def _text_ids(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        return [self._codec.prompt_ids(prompt, raw=isinstance(prompt, str)) for prompt in prompts]

    def _requests(self, body: ChatRequest | CompletionRequest, prompts: Sequence[list[int]]) -> list[Decoding]:
        context, schema = self.engine.decoder.context, body.schema_wanted
        drafting = body.drafting(self.engine.drafting, self.engine.pair)
        made = []
        for prompt in prompts:
            grammars = (
                self._grammars.processors(schema, len(prompt), body.choices, body.schema_field)
                if schema is not None
                else []
            )
            for choice in range(body.choices):
                sampling = body.sampling(choice, context, grammars[choice : choice + 1])
                prune = grammars[choice].prune if grammars else None
                made.append(Decoding(prompt, sampling, drafting, reuse=True, prune=prune))
        return made

    # From what is decoded to a reply

    async def _answer(
        self, kind: type[Writer], body: ChatRequest | CompletionRequest, call: Call, request: Request
    ) -> Response:
        writer = kind(
            self._model,
            self.engine.names,
            show_decoding=bool(body.return_decoding_stats),
            usage_chunk=bool(body.stream) and body.wants_usage_chunk,
        )
        details: dict[str, Any] = request.scope["state"]["log"]
        readers = self._tool_readers(body, len(call.answers))

        def note() -> None:
            self.engine.cancel(call)
            details.update(_log_fields(call))
            if self.settings.log_prompts:
                details["prompt"] = self._codec.tokenizer.decode(
                    list(call.answers[0].request.prompt), skip_special_tokens=False
                )

        if body.stream:
            return EventStream(self._stream(writer, body, call, readers), on_end=note)
        try:
            events = await unless_gone(_collect(call, readers), request.receive)
        except ClientGone:
            return Response(status_code=CLIENT_GONE)
        except Exception as error:
            raise api_error(error) from error
        finally:
            note()
        return _json(writer.reply(call.answers, events, usage(call.answers, body.choices)))

    def _tool_readers(self, body: ChatRequest | CompletionRequest, answers: int) -> list[ToolReader]:
        """One for every answer that may call tools; none where no answer of the request may."""
        form = "llama" if body.forced_tools else self._tool_format  # forced, it is a bare JSON object
        if form == "none" or not body.callable_names:
            return []
        return [ToolReader(form, body.callable_names) for _ in range(answers)]

    async def _stream(
        self, writer: Writer, body: ChatRequest | CompletionRequest, call: Call, readers: Sequence[ToolReader]
    ) -> AsyncIterator[bytes]:
        begun: set[int] = set()
        async for index, new in _events(call, readers):
            if new.error is not None:
                yield event(api_error(new.error).body)
                yield DONE
                return
            for chunk in writer.chunks(call.answers[index], new, first=index not in begun):
                yield event(chunk)
            begun.add(index)
        last = writer.usage_chunk(usage(call.answers, body.choices))
        if last is not None:
            yield event(last)
        yield DONE


async def _events(call: Call, readers: Sequence[ToolReader]) -> AsyncIterator[tuple[int, Event]]:
    """All events of a call, until every answer has ended or one has failed; read by the `readers`, if there are any."""
    left = len(call.answers)
    while left:
        index, new = await call.events.get()
        left -= new.last
        yield index, readers[index].read(new) if readers else new


async def _collect(call: Call, readers: Sequence[ToolReader]) -> list[list[Event]]:
    events: list[list[Event]] = [[] for _ in call.answers]
    async for index, new in _events(call, readers):
        if new.error is not None:
            raise new.error
        events[index].append(new)
    return events


def _log_fields(call: Call) -> dict[str, Any]:
    """What the log tells about a call; no text of it."""
    first = call.answers[0]
    fields: dict[str, Any] = {
        "outcome": [answer.outcome or "cancelled" for answer in call.answers],
        "prompt_tokens": len(first.request.prompt),
        "completion_tokens": sum(answer.stats.new_tokens for answer in call.answers),
        "cached_tokens": first.stats.reused_tokens,
        "mean_accepted": describe(first)["mean_accepted"],
        "decoding": first.request.drafting.method,
    }
    if first.started is not None:
        fields["queue_s"] = round(first.started - first.submitted, 4)
    if first.first_token is not None:
        fields["first_token_s"] = round(first.first_token - first.submitted, 4)
    return fields


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dumps(value), status, headers, media_type="application/json")


async def _refuse(request: Request, error: Exception) -> Response:
    found = api_error(error)
    _note_refusal(request, found)
    if found.status >= 500:
        cause = error.__cause__ or error
        frames = traceback.extract_tb(cause.__traceback__)
        request.scope["state"]["log"].update(
            error=type(cause).__name__, at=[f"{frame.name}:{frame.lineno}" for frame in frames[-4:]]
        )
    return _json(found.body, found.status, found.headers)


async def _refuse_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {400: "invalid_json", 404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = f"{request.method} {request.url.path}: {error.detail}" if code else str(error.detail)
    if error.status_code == 400:  # the framework's own, of a body that it cannot read
        message = "the body is not valid JSON: UTF-8 is expected, not nested too deep, without numbers of 4,300 digits"
    found = ApiError(error.status_code, message, code=code)
    _note_refusal(request, found)
    return _json(found.body, found.status, dict(error.headers or {}))


async def _refuse_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.method == "POST" and kind != "application/json" and not kind.endswith("+json"):
        found = ApiError(415, "the header Content-Type: application/json is expected", code="unsupported_media_type")
        _note_refusal(request, found)
        return _json(found.body, found.status)
    problem = _worst(error.errors())
    place = [part for part in problem["loc"] if part not in ("body", "path", "query")]
    param = _param(place)
    if problem["type"] == "json_invalid":
        detail = problem.get("ctx", {}).get("error", "")
        found = invalid(f"the body is not valid JSON: {detail}")
        found.code = "invalid_json"
    elif problem["type"] == "extra_forbidden":
        name = str(place[-1])[:100]
        unsupported = len(place) == 1 and name in UNSUPPORTED
        text = f"{param[:200]} is not supported by this server" if unsupported else f"{param[:200]} is an unknown field"
        found = invalid(text, param=param)
        found.code = "unsupported_parameter" if unsupported else "unknown_parameter"
    elif problem["type"] == "missing":
        found = invalid(f"{param} is missing" if param else "a JSON body is expected", param=param or None)
        found.code = "missing_required_parameter"
    else:
        text = _said(error.errors(), problem).removeprefix("Value error, ")
        found = invalid(f"{param}: {text}" if param else text, param=param or None)
    _note_refusal(request, found)
    return _json(found.body, 400)


def _note_refusal(request: Request, found: ApiError) -> None:
    """Tells the log what a client did wrong: code and field, nothing that it sent."""
    request.scope["state"]["log"].update({"code": found.code, "param": found.param})


def _worst(problems: Sequence[Any]) -> Any:
    """The problem to name: of a field with alternatives, the one that fits the most of what was given."""
    first = problems[0]["loc"]
    same_field = [p for p in problems if p["loc"][:2] == first[:2]]
    if len(first) < 2:
        return problems[0]
    return max(same_field, key=lambda p: (len(p["loc"]), not p["type"].endswith("_type")))


def _said(problems: Sequence[Any], named: Any) -> str:
    """What is wrong with the field: where it is none of several forms, all of them."""
    opening, length = "Input should be ", len(named["loc"])
    alike = [p["msg"] for p in problems if len(p["loc"]) == length and p["loc"][:2] == named["loc"][:2]]
    if not named["type"].endswith("_type") or not all(text.startswith(opening) for text in alike):
        return str(named["msg"])
    return opening + " or ".join(dict.fromkeys(text.removeprefix(opening) for text in alike))


def _param(place: Sequence[Any]) -> str:
    """A field's name as clients write it: `messages[0].role`; the names of a field's alternatives left out."""
    text = ""
    for part in place:
        if isinstance(part, int):
            text += f"[{part}]"
        elif isinstance(part, str) and part.isidentifier() and part not in ("str", "int", "float", "bool"):
            text += f".{part}" if text else part
        elif isinstance(part, str) and not text:
            text = part
    return text
