"""A server in this process, and the official OpenAI client talking to it.

Needs `pip install "dominotree[serve]" openai`. Usually the server is a process of its own: `dominotree serve`.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from openai import OpenAI

import dominotree as dt
from dominotree.serve.app import create_app
from dominotree.serve.engine import Limits
from dominotree.serve.run import Server


@contextmanager
def serving(pair: dt.Pair) -> Iterator[str]:
    """Serves a pair on a free port of this machine; gives the address for clients."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Server(create_app(pair, limits=Limits(context=1024, max_batch=2)))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            thread.join()


def main() -> None:
    """Asks once as a whole, with the decoding stats, and once as a stream."""
    with serving(dt.load("smollm2-135m")) as url, OpenAI(base_url=url, api_key="any") as client:
        model = client.models.list().data[0].id
        reply = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Why is the sky blue?"}],
            temperature=0,
            max_tokens=48,
            extra_body={"return_decoding_stats": True},
        )
        print(reply.choices[0].message.content)
        print(f"{reply.choices[0].decoding['mean_accepted']:.2f} tokens a pass\n")  # type: ignore[attr-defined]

        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Name three planets."}],
            temperature=0.7,
            seed=1,
            max_tokens=32,
            stream=True,
        )
        for chunk in stream:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        print()


if __name__ == "__main__":
    main()
