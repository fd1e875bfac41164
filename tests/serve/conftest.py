"""A server on a port of its own, in a thread, around a tiny pair."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
import torch
from fastapi import FastAPI

from cli.conftest import TEMPLATE, VOCAB, byte_tokenizer
from dominotree.drafters.dflash import Drafter
from dominotree.pair import Pair
from dominotree.sampling import Sampler
from dominotree.serve.app import Settings, create_app
from dominotree.serve.engine import Engine, Limits
from dominotree.serve.run import Server
from dominotree.text import TextCodec
from oracle import tiny_drafter
from targets.tiny import tiny_target

END = 1  # the tiny tokenizer's end token
FIRST_BYTE = 4  # ids of the tiny tokenizer: its special tokens, then one a byte


def tiny_pair(*, drafter: Drafter | None = None, seed: int = 0, **changes: Any) -> Pair:
    """A random pair that speaks bytes, in fp32."""
    target = tiny_target(vocab_size=VOCAB, max_position_embeddings=4096, seed=seed, **changes)
    codec = TextCodec(byte_tokenizer(), TEMPLATE, {"bos_token": "<|bos|>"})
    return Pair(target, codec, drafter or tiny_drafter(target), name="tiny")


@dataclass
class Served:
    """A running server and ways to talk to it."""

    app: FastAPI
    url: str
    server: Server

    @property
    def engine(self) -> Engine:
        engine: Engine = self.app.state.engine
        return engine

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0, timeout=60)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, **options)

    def metric(self, name: str, **labels: str) -> float:
        return self.engine.metrics.registry.get_sample_value(f"dominotree_{name}", labels) or 0.0

    def wait_until_idle(self) -> None:
        until(lambda: self.engine.open == 0)


def until(holds: Callable[[], bool], *, tries: int = 3000) -> None:
    """Waits for something to become true; fails after far longer than it should take."""
    pause = threading.Event()
    for _ in range(tries):
        if holds():
            return
        pause.wait(0.01)
    pytest.fail("what was waited for never happened")


@contextmanager
def serving(
    pair: Pair, limits: Limits | None = None, settings: Settings | None = None, **options: Any
) -> Iterator[Served]:
    """Serves a pair on a free port of the loopback interface, and stops at the end."""
    app = create_app(
        pair, options.pop("drafting", None), limits or Limits(context=512), settings or Settings(grace_s=0)
    )
    for name, value in options.items():
        setattr(app.state.engine, name, value)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = Server(app)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    until(lambda: server.started)
    try:
        yield Served(app, f"http://127.0.0.1:{listener.getsockname()[1]}", server)
    finally:
        server.should_exit = True
        thread.join(60)
        listener.close()
        assert not thread.is_alive()
        assert not app.state.engine.live


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """One server for the tests of a module."""
    with serving(tiny_pair()) as made:
        yield made


class Brake:
    """Holds the engine before every round, until it is let go."""

    def __init__(self, served: Served) -> None:
        self._permits, self._free = threading.Semaphore(0), False
        self._decoder, self._step = served.engine.decoder, served.engine.decoder.step
        self.rounds = 0  # begun, a held one included

    def __enter__(self) -> Brake:
        self._decoder.step = self._held_step  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        self._decoder.step = self._step  # type: ignore[method-assign]

    def let(self, rounds: int = 1) -> None:
        """Lets the engine do that many rounds."""
        self._permits.release(rounds)

    def release(self) -> None:
        """Lets it run."""
        self._free = True
        self._permits.release(1000)

    def _held_step(self) -> None:
        self.rounds += 1
        if not self._free:
            self._permits.acquire(timeout=60)
        self._step()


def say(monkeypatch: pytest.MonkeyPatch, text: str, *, end: bool = True) -> list[int]:
    """Has the target say `text` (and its end token), whatever it would have said; needs a temperature above 0."""
    ids = [*byte_tokenizer().encode(text).ids, *([END] if end else [])]

    def choose(self: Sampler, logits: torch.Tensor, path: Sequence[int]) -> int:
        return ids[len(path)] if len(path) < len(ids) else END

    monkeypatch.setattr(Sampler, "choose", choose)
    return ids


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """The server's log goes where it went, whatever a test does to it."""
    log = logging.getLogger("dominotree.serve")
    before = list(log.handlers), log.propagate, log.level
    yield
    log.handlers[:], log.propagate = before[0], before[1]
    log.setLevel(before[2])
