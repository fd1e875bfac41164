"""`dominotree serve`: from the command to an answer, and out again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from cli.conftest import drafter, model  # noqa: F401  (fixtures)
from dominotree.cli import app
from dominotree.errors import InvalidRequest
from dominotree.pair import load
from dominotree.serve.app import create_app
from dominotree.serve.run import listen, serve

BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "seed": 1}


@contextmanager
def command(*args: object, **env: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Runs the server in a process of its own; gives it and its address."""
    run = [sys.executable, "-m", "dominotree", "serve", "--port", "0", "--grace", "1", *map(str, args)]
    process = subprocess.Popen(run, stderr=subprocess.PIPE, text=True, env={**os.environ, **env})
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("{") and json.loads(line)["event"] == "listening":
                yield process, json.loads(line)["address"]
                break
        else:
            pytest.fail("the server said no address")
    finally:
        process.kill()
        process.wait(30)


def test_the_command_serves_until_it_is_told_to_stop(model: Path, drafter: Path) -> None:  # noqa: F811
    pair = ("--target", model, "--drafter", drafter, "--dtype", "float32", "--context", 256)
    names = ("--model-name", "small", "--allowed-host", "Models.example:8000", "--no-page")
    with command(*pair, "--budget", 5, *names, DOMINOTREE_API_KEY="sesame") as (process, url):
        assert url.startswith("http://127.0.0.1:")
        assert httpx.post(f"{url}/v1/chat/completions", json=BODY, timeout=60).status_code == 401
        right = {"authorization": "Bearer sesame"}
        body = {**BODY, "model": "small", "return_decoding_stats": True}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, headers=right, timeout=60).json()
        assert reply["choices"][0]["decoding"]["budget"] == 5
        assert reply["model"] == "small"
        models = httpx.get(f"{url}/v1/models", headers=right, timeout=60).json()
        assert models["data"][0]["max_model_len"] == 256
        assert httpx.get(f"{url}/", headers=right, timeout=60).status_code == 404
        for host, status in (("models.example", 200), ("other.example", 403)):
            assert httpx.get(f"{url}/health", headers={"host": host}, timeout=60).status_code == status
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def test_a_second_interrupt_ends_answers_at_once_and_in_order(model: Path, drafter: Path) -> None:  # noqa: F811
    many = {**BODY, "max_tokens": 200, "n": 16, "ignore_eos": True, "stream": True}
    pair = ("--target", model, "--drafter", drafter, "--dtype", "float32", "--context", 256, "--max-batch", 1)
    with command(*pair, "--grace", 600) as (process, url):
        events = []
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=many, timeout=60) as reply:
            for line in filter(None, reply.iter_lines()):
                events.append(line)
                if len(events) == 3:
                    process.send_signal(signal.SIGINT)
                    time.sleep(0.2)
                    process.send_signal(signal.SIGINT)
        assert "error" in json.loads(events[-2].removeprefix("data: "))
        assert events[-1] == "data: [DONE]"
        assert process.wait(60) == 130  # as every command that was interrupted
        assert process.stderr is not None
        *log, last = filter(None, process.stderr.read().splitlines())
        told = [json.loads(line)["event"] for line in log]  # other events may come between
        assert [event for event in told if "shutting" in event] == ["shutting down", "shutting down at once"]
        assert last == "Interrupted."


@pytest.mark.parametrize("method", ["ar", "lookup"])
def test_requests_may_draft_where_the_default_does_not(model: Path, drafter: Path, method: str) -> None:  # noqa: F811
    pair = ("--target", model, "--drafter", drafter, "--dtype", "float32", "--context", 256)
    with command(*pair, "--method", method) as (_, url):
        body = {**BODY, "return_decoding_stats": True}
        for asked, used in ((None, method), ("dominotree", "dominotree")):
            wish = {} if asked is None else {"method": asked}
            reply = httpx.post(f"{url}/v1/chat/completions", json={**body, **wish}, timeout=60).json()
            assert reply["choices"][0]["decoding"]["method"] == used


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--max-batch", "0"], "max_batch"),
        (["--max-queue", "-1"], "max_queue"),
        (["--max-rows", "0"], "max_rows"),
        (["--timeout", "0"], "timeout"),
        (["--max-body", "1"], "max_body"),
        (["--api-key", " "], "key"),
        (["--api-key", "sesame\n"], "white space"),
        (["--context", "1"], "context is 1"),
        (["--method", "magic"], "magic"),
        (["--port", "70000"], "port"),
        (["--host", ""], "host"),
        (["--allowed-host", " "], "host"),
        (["--model-name", ""], "name"),
        (["--target", ""], "target"),
        (["--drafter", " "], "drafter"),
        (["--grace", "-5"], "grace"),
        (["--grace", "inf"], "grace"),
        (["--grace", "nan"], "grace"),
    ],
)
def test_wrong_use_is_one_line(args: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["serve", *args])
    assert result.exit_code == 2
    assert says in result.stderr and len(result.stderr.strip().splitlines()) == 1


def test_an_empty_variable_makes_no_open_server() -> None:
    result = CliRunner().invoke(app, ["serve"], env={"DOMINOTREE_API_KEY": ""})
    assert result.exit_code == 2
    assert "DOMINOTREE_API_KEY is set and empty" in result.stderr


def test_an_address_that_is_taken_is_one_line(model: Path, drafter: Path) -> None:  # noqa: F811
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        pair = ["--target", str(model), "--drafter", str(drafter), "--context", "64"]
        result = CliRunner().invoke(app, ["serve", *pair, "--port", port])
    assert result.exit_code == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in result.stderr


def test_of_two_servers_that_want_one_address_one_is_told(model: Path, drafter: Path) -> None:  # noqa: F811
    """Both may bind it while neither listens."""
    first = listen(port=0)
    port = first.getsockname()[1]
    second = listen(port=port)
    first.listen()
    pair = load(target=str(model), drafter=str(drafter), dtype="float32", context=64)
    with first, pytest.raises(InvalidRequest, match="cannot listen"):
        serve(create_app(pair), port=port, listener=second)
