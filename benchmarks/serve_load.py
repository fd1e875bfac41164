"""The server under load: throughput and latency by number of clients, or a soak that checks every answer.

python benchmarks/serve_load.py                                  # ar and dominotree at 1, 4, 8, 16 clients
python benchmarks/serve_load.py --soak 180 --clients 32 --tiny   # cancels, bad requests, disconnects; a random pair

The server runs in this process, the clients in one of their own, so that memory and the interpreter's lock are the
server's. A closed loop: a client sends its next request when it has its answer. Time to first token counts from
sending to the first text that arrives, the queue included. Prompts and lengths are the same for every method, and the
slots are filled with something else before every pass, so that no method profits from another's prefix cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np

if TYPE_CHECKING:
    from fastapi import FastAPI

    import dominotree as dt

CHAT = "/v1/chat/completions"
LONG_SOAK_S = 60  # shorter ones say nothing about memory, which grows while a server gets warm
OPENINGS = [
    "Explain to a ten-year-old how rain comes about.",
    "Write a Python function that reverses a linked list.",
    "A shirt costs 40 after a discount of 20 percent. What did it cost before?",
    "List three things to look out for when buying a used bicycle.",
    "Summarise the following notes in one sentence.",
    "用中文介绍一下月亮。",
]
FILLER = "The meeting began at nine, and nobody had read the agenda. "
BAD: list[tuple[bytes, int]] = [
    (b'{"messages": [{"role": "user", "content": "x"}], "temperature": 9}', 400),
    (b'{"messages": [{"role": "user", "content": "x"}], "frobnicate": 1}', 400),
    (b'{"messages": []}', 400),
    (b'{"messages": [{"role": "user", "content": "x"}], "model": "another"}', 404),
    (b'{"messages": [', 400),
    (json.dumps({"messages": [{"role": "user", "content": "too long " * 20000}]}).encode(), 400),
]

# Clients: they run in a process of their own and know the server only by its address


@dataclass(frozen=True)
class Sample:
    """An answer as a client saw it; times in seconds from sending, None for the first token where none was shown."""

    request: int
    text: str
    reason: str
    first_s: float | None
    whole_s: float
    tokens: int
    cached: int

    @property
    def token_s(self) -> float | None:
        """Mean time from token to token."""
        return None if self.first_s is None or self.tokens < 2 else (self.whole_s - self.first_s) / (self.tokens - 1)


async def stream(client: httpx.AsyncClient, number: int, body: dict[str, Any]) -> Sample:
    """One streamed answer; raises `httpx.HTTPStatusError` for a refusal, `RuntimeError` for an error in the stream."""
    started, first, text, reason = time.perf_counter(), None, "", ""
    usage: dict[str, Any] = {}
    async with client.stream(
        "POST", CHAT, json={**body, "stream": True, "stream_options": {"include_usage": True}}
    ) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                piece = choice["delta"].get("content") or ""
                if piece and first is None:
                    first = time.perf_counter() - started
                text, reason = text + piece, choice["finish_reason"] or reason
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Sample(number, text, reason, first, time.perf_counter() - started, usage["completion_tokens"], cached)


def _client(url: str, clients: int) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=2 * clients, max_keepalive_connections=clients)
    return httpx.AsyncClient(base_url=url, timeout=600, limits=limits, trust_env=False)


def load(url: str, bodies: Sequence[dict[str, Any]], clients: int) -> tuple[list[Sample], float]:
    """All of `bodies`, `clients` at a time; the samples and the seconds that it took."""

    async def run() -> tuple[list[Sample], float]:
        numbers, samples = iter(range(len(bodies))), []
        started = time.perf_counter()

        async def one() -> None:
            for number in numbers:
                samples.append(await stream(client, number, bodies[number]))

        async with _client(url, clients) as client:
            await asyncio.gather(*(one() for _ in range(clients)))
        return samples, time.perf_counter() - started

    return asyncio.run(run())


def soak(
    url: str, bodies: Sequence[dict[str, Any]], expected: Sequence[tuple[str, str]], clients: int, seconds: float
) -> tuple[Counter[str], list[str]]:
    """Well- and ill-behaved clients until the time is over: what happened how often, and what should not have."""
    happened: Counter[str] = Counter()
    faults: list[str] = []
    end = time.monotonic() + seconds

    async def act(client: httpx.AsyncClient, rng: random.Random, kind: str) -> None:
        number = rng.randrange(len(bodies))
        if kind == "stream":
            found = await stream(client, number, bodies[number])
            _compare((found.text, found.reason), number)
        elif kind == "whole":
            reply = await client.post(CHAT, json=bodies[number])
            reply.raise_for_status()
            choice = reply.json()["choices"][0]
            _compare((choice["message"]["content"], choice["finish_reason"]), number)
        elif kind == "cancel":
            lines = rng.randrange(12)
            async with client.stream("POST", CHAT, json={**bodies[number], "stream": True}) as reply:
                reply.raise_for_status()
                async for _ in reply.aiter_lines():
                    lines -= 1
                    if lines < 0:
                        break
        elif kind == "disconnect":
            await _hang_up(client.base_url, bodies[number], rng)
        else:
            content, status = rng.choice(BAD)
            reply = await client.post(CHAT, content=content, headers={"content-type": "application/json"})
            if reply.status_code == 429:
                reply.raise_for_status()
            if reply.status_code != status or "error" not in reply.json():
                faults.append(f"bad request {content[:60]!r}: status {reply.status_code}, not {status}")
        happened[kind] += 1

    def _compare(found: tuple[str, str], number: int) -> None:
        if found != expected[number]:
            faults.append(f"request {number}: {found!r} is not its solo answer {expected[number]!r}")

    async def one(client: httpx.AsyncClient, seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < end:
            kind = rng.choices(["stream", "whole", "cancel", "disconnect", "bad"], [35, 25, 15, 15, 10])[0]
            try:
                await act(client, rng, kind)
            except httpx.HTTPStatusError as error:
                if error.response.status_code == 429:
                    happened["queue full"] += 1
                    await asyncio.sleep(rng.random())
                else:
                    faults.append(f"{kind}: status {error.response.status_code}")
            except Exception as error:
                faults.append(f"{kind}: {type(error).__name__} {error}")

    async def run() -> None:
        async with _client(url, clients) as client:
            await asyncio.gather(*(one(client, seed) for seed in range(clients)))

    asyncio.run(run())
    return happened, faults


async def _hang_up(url: httpx.URL, body: dict[str, Any], rng: random.Random) -> None:
    """Leaves in the middle of a request, or soon after it."""
    content = json.dumps({**body, "stream": rng.random() < 0.5}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: {url.host}\r\nContent-Type: application/json\r\n"
    sent = head.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content
    _, writer = await asyncio.open_connection(url.host, url.port)
    whole = rng.random() < 0.7
    writer.write(sent if whole else sent[: rng.randrange(1, len(sent))])
    await writer.drain()
    await asyncio.sleep(rng.random() * 0.3)
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


# The server's side


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder, hub id or name of a pair (default: the default pair)")
    parser.add_argument("--drafter")
    parser.add_argument("--tiny", action="store_true", help="a random pair of the tests instead, in fp32")
    parser.add_argument("--dtype", default="float32", help="answers are compared, so it should be exact (float32)")
    parser.add_argument("--methods", default="ar,dominotree")
    parser.add_argument("--clients", default="1,4,8,16", help="numbers of clients; a soak takes the last")
    parser.add_argument("--requests", type=int, default=4, help="per client")
    parser.add_argument("--max-tokens", type=int, default=96, help="of the longest answers")
    parser.add_argument("--max-batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--soak", type=float, metavar="SECONDS")
    parser.add_argument("--json", type=Path, help="file for every sample")
    args = parser.parse_args()
    counts, methods = [int(n) for n in args.clients.split(",")], args.methods.split(",")
    pair = tiny_pair() if args.tiny else load_pair(args)
    with (
        serving(pair, args.max_batch, max(counts), args.context) as (url, app),
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as elsewhere,
    ):
        if args.soak is None:
            measure(elsewhere, url, args, counts, methods)
        elif not endure(elsewhere, url, app, pair, args, counts[-1], methods):
            sys.exit(1)


def load_pair(args: argparse.Namespace) -> dt.Pair:
    """The pair that the command line names."""
    import dominotree as dt

    return dt.load(target=args.target, drafter=args.drafter, dtype=args.dtype)


def tiny_pair() -> dt.Pair:
    """A random target with a random drafter; what they say means nothing, but all that a server does happens."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from serve.conftest import tiny_pair as made

    return made()


@contextmanager
def serving(pair: dt.Pair, max_batch: int, clients: int, context: int) -> Iterator[tuple[str, FastAPI]]:
    """The server on a free port, in a thread."""
    from dominotree.serve.app import Settings, create_app
    from dominotree.serve.engine import Limits
    from dominotree.serve.run import Server

    limits = Limits(max_batch=max_batch, max_queue=max(1, clients - max_batch // 2), context=context)
    app = create_app(pair, None, limits, Settings(grace_s=0))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = Server(app)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", app
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def mixed(count: int, most: int, longest_prompt: int) -> list[dict[str, Any]]:
    """Requests of mixed lengths and temperatures, the same for the same numbers."""
    rng = random.Random(7)
    made = []
    for i in range(count):
        filler = FILLER * (rng.choice([0, 0, 1, 4, 12]) * longest_prompt // (12 * len(FILLER)))
        question = f"{OPENINGS[i % len(OPENINGS)]} ({i}) {filler}"
        made.append(
            {
                "messages": [{"role": "user", "content": question}],
                "max_tokens": rng.choice([most // 6, most // 3, most // 2, most]),
                "temperature": rng.choice([0, 0, 0.7, 1]),
                "seed": i,
                "ignore_eos": True,
            }
        )
    return made


def measure(
    elsewhere: ProcessPoolExecutor, url: str, args: argparse.Namespace, counts: Sequence[int], methods: Sequence[str]
) -> None:
    """Prints a row for every number of clients and method; ratios are to the first method."""
    prompt = args.context - args.max_tokens - 128 if args.tiny else 2 * args.context
    wash = [
        {"messages": [{"role": "user", "content": f"{i} wash"}], "max_tokens": 16, "ignore_eos": True}
        for i in range(args.max_batch)
    ]
    print("clients  method      tokens/s  ratio   first token p50/p95 ms   per token p50/p95 ms   cached  identical")
    rows = []
    for clients in counts:
        bodies = mixed(args.requests * clients, args.max_tokens, prompt)
        base: dict[str, Any] = {}
        for method in methods:
            elsewhere.submit(load, url, [{**body, "method": method} for body in wash], args.max_batch).result()
            samples, wall = elsewhere.submit(load, url, [{**b, "method": method} for b in bodies], clients).result()
            speed = sum(sample.tokens for sample in samples) / wall
            texts = {sample.request: sample.text for sample in samples}
            base = base or {"speed": speed, "texts": texts}
            parted = sum(texts[i] != text for i, text in base["texts"].items())
            first = percentiles([sample.first_s for sample in samples])
            each = percentiles([sample.token_s for sample in samples])
            print(
                f"{clients:7}  {method:10}  {speed:8.1f}  {speed / base['speed']:4.2f}x  {first:>23}  {each:>21}  "
                f"{sum(sample.cached for sample in samples):6}  {f'{parted} differ' if parted else 'yes'}",
                flush=True,
            )
            rows.append({"clients": clients, "method": method, "wall_s": wall, "samples": [asdict(s) for s in samples]})
    if args.json:
        args.json.write_text(json.dumps(rows, ensure_ascii=False))


def percentiles(seconds: Sequence[float | None]) -> str:
    """Median and 95th percentile in milliseconds."""
    known = [1000 * s for s in seconds if s is not None]
    return "-" if not known else f"{np.percentile(known, 50):.1f} / {np.percentile(known, 95):.1f}"


def endure(
    elsewhere: ProcessPoolExecutor,
    url: str,
    app: FastAPI,
    pair: dt.Pair,
    args: argparse.Namespace,
    clients: int,
    methods: Sequence[str],
) -> bool:
    """A soak; prints what happened, and says whether all was as it should be."""
    bodies = mixed(24, args.max_tokens, args.context - args.max_tokens - 128 if args.tiny else 2 * args.context)
    fields = ("temperature", "seed", "ignore_eos")
    solo = []
    for body in bodies:
        options = {"max_new_tokens": body["max_tokens"], **{name: body[name] for name in fields}}
        output = pair.generate(body["messages"], method="ar", **options)
        solo.append((output.text, output.finish_reason))
    asked = [{**body, "method": method} for method in methods for body in bodies]
    elsewhere.submit(load, url, asked[:1], 1).result()
    start = resident_mib()
    running = elsewhere.submit(soak, url, asked, solo * len(methods), clients, args.soak)
    memory = [start, *watch(running)]
    happened, faults = running.result()
    engine = app.state.engine
    for _ in range(200):  # what was cancelled last may take a round more
        if engine.open == 0 and not engine.decoder.busy:
            break
        time.sleep(0.05)
    free = len(engine.decoder._cache.free)
    if engine.open or engine.decoder.busy or free != args.max_batch:
        faults.append(f"left behind: {engine.open} answers open, {free} of {args.max_batch} slots free")
    if not engine.ready:
        faults.append("the engine is not ready any more")
    middle, late = (statistics.median(memory[len(memory) * a // 10 :][: len(memory) // 10 + 1]) for a in (5, 9))
    if args.soak >= LONG_SOAK_S and late > 1.1 * middle:
        faults.append(f"memory still grows: {middle:.0f} MiB in the middle, {late:.0f} MiB at the end")
    print(f"{clients} clients, {args.soak:.0f} s: " + ", ".join(f"{n} {kind}" for kind, n in happened.most_common()))
    print(f"resident MiB: start {start:.0f}, middle {middle:.0f}, end {late:.0f}, most {max(memory):.0f}")
    print(f"queue empty, {free} of {args.max_batch} slots free" if not engine.open else "answers left behind")
    for fault, n in Counter(faults).most_common(20):
        print(f"FAULT ({n}x) {fault[:400]}")
    print("every completed answer is its solo answer" if not faults else f"{len(faults)} faults")
    return not faults and happened["stream"] + happened["whole"] > 0


def watch(running: Future[Any]) -> list[float]:
    """Resident memory once a second, in MiB, until it is over."""
    seen = []
    while not running.done():
        time.sleep(1)
        seen.append(resident_mib())
    return seen


def resident_mib() -> float:
    """Memory of this process, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    main()
