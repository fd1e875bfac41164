"""What every request passes first: its id, the host, the key, the size of its body; and the line of the log."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import re
import secrets
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dominotree.serve.errors import ApiError
from dominotree.serve.metrics import Metrics
from dominotree.serve.replies import dumps

log = logging.getLogger("dominotree.serve")

DEFAULT_MAX_BODY = 4 * 2**20
BODY_TIMEOUT_S = 60.0
DRAIN_BYTES, DRAIN_S = 16 * 2**20, 5.0
"""How much is still read, and for how long, of the body of a request that was refused before."""
_OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
ANY_HOST = "*"
_GOOD_ID = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


class Gate:
    """Outermost layer of the server. Requests that do not pass are answered here, in the shape of all errors."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_key: str | None,
        max_body: int,
        metrics: Metrics,
        routes: Iterable[str],
        open_paths: Iterable[str] = (),
        hosts: Iterable[str] = (),
    ) -> None:
        """`routes` are the paths that metrics tell apart, `open_paths` need no key.

        `hosts` are names that the server goes by, beside localhost and addresses in numbers; `ANY_HOST` is all.
        """
        self._app, self._max_body, self._metrics = app, max_body, metrics
        self._key = None if api_key is None else api_key.encode()
        self._routes = frozenset(routes)
        self._open_paths = _OPEN_PATHS | frozenset(open_paths)
        self._hosts = frozenset(_host_name(name.strip()) for name in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI side."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, headers = time.monotonic(), dict(scope["headers"])
        wished = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = wished if _GOOD_ID.fullmatch(wished) else "req-" + secrets.token_hex(8)
        details: dict[str, Any] = {}
        body = _Body(receive)
        scope.setdefault("state", {}).update(request_id=request_id, log=details)
        status, headless = 0, scope["method"] == "HEAD"  # which is GET without a body, on every route
        inner = {**scope, "method": "GET"} if headless else scope

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.encode())]}
            elif headless:
                message = {**message, "body": b""}
            await send(message)

        try:
            self._check_host(headers)
            self._check_key(scope, headers)
            whole = await self._read(headers, body)
            await self._app(inner, _replay(whole, receive), tagged)
        except ApiError as error:
            await body.drain()
            await _refuse(error, tagged)
        except Exception as error:
            frames = [f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
            log.error("unexpected", extra={"fields": {"error": type(error).__name__, "at": frames[-4:]}})
            if not status:
                hidden = ApiError(500, "something unexpected went wrong", kind="server_error", code="internal")
                await _refuse(hidden, tagged)
        finally:
            route = next((r for r in self._routes if _is_on(scope["path"], r)), "other")
            self._metrics.requests.labels(route, str(status or 499)).inc()
            record = {
                "request_id": request_id,
                "method": scope["method"],
                "path": route if route != "other" else scope["path"][:80],
                "status": status or 499,
                "seconds": round(time.monotonic() - started, 4),
                **details,
            }
            log.info("request", extra={"fields": record})

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        """Refuses names that are not this server's.

        A page elsewhere can have its own name resolve to this machine, and would then be let in by the browser as if
        it came from here. It cannot do that with an address in numbers, nor with localhost.
        """
        name = _host_name(headers.get(b"host", b"").decode("latin-1"))
        if not name or ANY_HOST in self._hosts or name in self._hosts or name.endswith(".localhost"):
            return
        if name == "localhost" or _is_address(name):
            return
        raise ApiError(
            403,
            f"this server does not go by the name {name[:100]}; start it with --allowed-host {name[:100]} if it should",
            code="unknown_host",
        )

    def _check_key(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        if self._key is None or scope["path"] in self._open_paths:
            return
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._key):
            raise ApiError(
                401,
                "a valid key is expected in the header Authorization: Bearer KEY",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _read(self, headers: dict[bytes, bytes], body: _Body) -> bytes:
        too_large = ApiError(413, f"the body is larger than {self._max_body} bytes", code="body_too_large")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body:
            raise too_large
        whole = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while not body.ended:
                    whole += await body.more()
                    if len(whole) > self._max_body:
                        raise too_large
        except TimeoutError:
            raise ApiError(408, "the body took too long to arrive", code="timeout") from None
        return bytes(whole)


class _Body:
    """A request's body as it arrives."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self.ended = receive, False

    async def more(self) -> bytes:
        """The next part of it; raises `ApiError` where the client is gone."""
        message = await self._receive()
        self.ended = message["type"] == "http.disconnect" or not message.get("more_body", False)
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the body ended early")
        part: bytes = message.get("body", b"")
        return part

    async def drain(self) -> None:
        """Takes what is left of it, within bounds: a connection closed before that loses the reply to it."""
        left = DRAIN_BYTES
        with suppress(TimeoutError, ApiError):
            async with asyncio.timeout(DRAIN_S):
                while not self.ended and left > 0:
                    left -= len(await self.more())


def _is_on(path: str, route: str) -> bool:
    """Whether a path is that of a route, which may end with a part that is any: `/v1/models/{model}`."""
    beginning, mark, _ = route.partition("{")
    return path == route if not mark else path.startswith(beginning) and len(path) > len(beginning)


def _host_name(host: str) -> str:
    """The name in a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".").lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body again, then what comes after it."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return pending.pop() if pending else await receive()

    return next_message


async def _refuse(error: ApiError, send: Send) -> None:
    body = dumps(error.body)
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    if error.status in (408, 413):  # what is left of the body is not read
        headers["connection"] = "close"
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
