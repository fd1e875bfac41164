"""Running the server: sockets, signals, the log."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from dominotree.errors import InvalidRequest

log = logging.getLogger("dominotree.serve")

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_BACKLOG = 2048
_MARGIN_S = 5.0
_KEEP_ALIVE_S = 75
"""Longer than clients keep an idle connection, or a request could meet one that is just being closed here: uvicorn's
own 5 s are also those of httpx, and so of the openai client."""


class Server(uvicorn.Server):
    """Shuts down in order: no new requests, running ones finish or end with an error, then connections close.

    A second signal ends the running ones at once, in the same order; uvicorn would drop connections and threads.
    """

    def __init__(self, app: FastAPI, *, host: str = "127.0.0.1", port: int = 8000) -> None:
        self.engine, self.grace_s = app.state.engine, app.state.settings.grace_s
        self._hurried = self.interrupted = False
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(self.grace_s + _MARGIN_S),
            )
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, with a word to the engine first."""
        log.info("shutting down", extra={"fields": {"answers": self.engine.open, "grace_s": self.grace_s}})
        self.engine.close(self.grace_s)
        hurry = asyncio.create_task(self._hurry())
        try:
            await super().shutdown(sockets)
        finally:
            hurry.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Notes a signal."""
        self.interrupted |= sig == signal.SIGINT
        if self.should_exit:
            self._hurried = True
        else:
            super().handle_exit(sig, frame)

    async def _hurry(self) -> None:
        while not self._hurried:  # a signal's handler may not wait for the engine's lock
            await asyncio.sleep(0.1)
        log.info("shutting down at once", extra={"fields": {"answers": self.engine.open}})
        self.engine.close()


def listen(host: str = "127.0.0.1", port: int = 8000) -> socket.socket:
    """A socket at the address; raises `InvalidRequest` where that cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with _may_be_taken(listener, host, port):
        listener.bind((host, port))
    return listener


@contextmanager
def _may_be_taken(listener: socket.socket, host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        listener.close()
        reason = error.strerror or error
        raise InvalidRequest(f"cannot listen on {host} port {port} ({reason}); choose another with --port") from error


def serve(app: FastAPI, *, host: str = "127.0.0.1", port: int = 8000, listener: socket.socket | None = None) -> None:
    """Serves until a signal ends it, at the address or at a socket that `listen` made for it.

    Raises `InvalidRequest` where the address cannot be had.
    """
    listener = listener or listen(host, port)
    with _may_be_taken(listener, host, port):  # by a server that was started at the same time
        listener.listen(_BACKLOG)
    address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
    log.info("listening", extra={"fields": {"address": address, **_about(app)}})
    if host not in _LOOPBACK and app.state.settings.api_key is None:
        log.warning("reachable from other machines without a key; set --api-key")
    server = Server(app, host=host, port=port)
    asyncio.run(server.serve(sockets=[listener]))
    if server.interrupted:  # uvicorn raises the signal again as it ends, which the loop does not always let through
        raise KeyboardInterrupt


def _about(app: FastAPI) -> dict[str, Any]:
    """What is served and how, for the log."""
    engine = app.state.engine
    target, drafting = engine.pair.target, engine.drafting
    return {
        "model": engine.pair.name,
        "dtype": target.precision,
        "device": str(target.device),
        "method": drafting.method,
        "budget": drafting.most_nodes if drafting.kind.shape == "tree" else None,
        "context": engine.decoder.context,
        "slots": engine.decoder.slots,
        "profile": engine.decoder.adaptive is not None,
    }


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, event, and the fields given with it. No text of prompts or answers."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        fields: dict[str, Any] = getattr(record, "fields", {})
        line = {"time": stamp, "level": record.levelname.lower(), "event": record.getMessage(), **fields}
        if record.exc_info and record.exc_info[2] is not None:
            frames = traceback.extract_tb(record.exc_info[2])
            line["at"] = [f"{frame.name}:{frame.lineno}" for frame in frames[-6:]]
        return json.dumps(line, ensure_ascii=True)


def log_to(stream: Any = None) -> None:
    """From now on the server's log goes to `stream` (standard error by default) as JSON lines, and so does what
    uvicorn warns of.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines())
    for logger, level in ((log, logging.INFO), (logging.getLogger("uvicorn.error"), logging.WARNING)):
        logger.handlers[:], logger.propagate = [handler], False
        logger.setLevel(level)
