"""Keys, sizes, ids, logs, metrics and the small routes."""

from __future__ import annotations

import io
import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest

from dominotree.costs import calibration_path, profile_key, profile_path
from dominotree.errors import InvalidRequest
from dominotree.serve.app import Settings
from dominotree.serve.engine import Limits
from dominotree.serve.run import log_to
from oracle import tiny_costs
from serve.conftest import Served, serving, tiny_pair, until

HELLO = [{"role": "user", "content": "a secret question"}]
CHAT = "/v1/chat/completions"
SHORT = {"messages": HELLO, "max_tokens": 3, "seed": 1}


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    settings = Settings(api_key="open sesame", max_body=2000, grace_s=0)
    with serving(tiny_pair(), Limits(context=512), settings) as made:
        yield made


def test_a_key_is_asked_for_everywhere_but_for_health(locked: Served) -> None:
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "open sesame"},
        {"authorization": "Basic open sesame"},
    ):
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nowhere"):
            refused = locked.get(path, headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
        assert locked.post(CHAT, SHORT, headers=headers).status_code == 401
    assert locked.get("/health").status_code == 200
    right = {"authorization": "Bearer open sesame"}
    assert locked.post(CHAT, SHORT, headers=right).status_code == 200
    assert locked.get("/v1/models", headers=right).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        locked.client.models.list()


def test_a_body_that_is_too_large_is_refused_however_it_is_sent(locked: Served) -> None:
    right = {"authorization": "Bearer open sesame"}
    large = {**SHORT, "user": "x" * 3000}
    assert locked.post(CHAT, large, headers=right).status_code == 413
    pieces = (piece.encode() for piece in json.dumps(large))
    with suppress(httpx.WriteError):  # the server may close the connection before all is written
        assert httpx.post(locked.url + CHAT, content=pieces, headers=right, timeout=60).status_code == 413
    assert locked.post(CHAT, SHORT, headers=right).status_code == 200


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"authorization": "Bearer open sesame"}, "body_too_large"),
        ({"authorization": "Bearer wrong"}, "invalid_api_key"),
        ({"authorization": "Bearer open sesame", "host": "elsewhere.example"}, "unknown_host"),
    ],
)
def test_a_refusal_before_a_large_body_was_read_arrives(locked: Served, headers: dict[str, str], code: str) -> None:
    with httpx.Client(base_url=locked.url, timeout=60) as client:
        for _ in range(8):
            assert client.get("/health").status_code == 200
            refused = client.post(CHAT, content=b"x" * 1_000_000, headers=headers)
            assert refused.json()["error"]["code"] == code


def test_no_origin_is_allowed_by_default(served: Served) -> None:
    reply = served.get("/v1/models", headers={"origin": "http://elsewhere.example"})
    assert not [name for name in reply.headers if name.startswith("access-control")]


def test_models_are_listed_for_clients(served: Served) -> None:
    listed = served.client.models.list().data
    assert [model.id for model in listed] == ["tiny"]
    assert served.client.models.retrieve("tiny").object == "model"


def test_head_is_get_without_a_body(served: Served, locked: Served) -> None:
    for path in ("/health", "/v1/models", "/", "/metrics", "/nowhere"):
        head, get = (httpx.request(method, served.url + path, timeout=60) for method in ("HEAD", "GET"))
        assert (head.status_code, head.content) == (get.status_code, b"")
    assert httpx.head(served.url + "/v1/models").headers["content-length"] == str(len(served.get("/v1/models").content))
    assert httpx.head(served.url + CHAT).status_code == 405
    assert httpx.head(locked.url + "/v1/models").status_code == 401


def test_clients_may_leave_out_the_version(served: Served) -> None:
    for path in ("/chat/completions", "/models", "/models/tiny"):
        both = [
            served.post(prefix + path, SHORT) if "chat" in path else served.get(prefix + path) for prefix in ("/v1", "")
        ]
        assert [reply.status_code for reply in both] == [200, 200]
    assert served.get("/v1/models/").json() == served.get("/v1/models").json()
    assert "/chat/completions" not in served.get("/openapi.json").json()["paths"]


def test_tokenize_and_back(served: Served) -> None:
    found = served.post("/tokenize", {"prompt": "héllo"}).json()
    assert found["count"] == len(found["tokens"]) == 6
    assert found["max_model_len"] == 512
    assert served.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": "héllo"}
    chat = served.post("/tokenize", {"messages": HELLO}).json()["tokens"]
    assert chat == served.engine.pair.prompt_ids(HELLO)
    for wrong in ({}, {"prompt": "x", "messages": HELLO}, {"prompt": 3}, {"prompt": "x", "frob": 1}):
        assert served.post("/tokenize", wrong).status_code == 400
    assert served.post("/detokenize", {"tokens": [10**6]}).json()["error"]["param"] == "tokens"


def test_health_tells_alive_from_ready(served: Served) -> None:
    assert served.get("/health").json() == {"live": True, "ready": True}
    assert served.get("/health/live").status_code == served.get("/health/ready").status_code == 200


def test_every_reply_has_an_id_and_keeps_the_clients(served: Served) -> None:
    ids = {served.post(CHAT, SHORT).headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2
    assert served.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert served.get("/health", headers={"x-request-id": "no good!"}).headers["x-request-id"] != "no good!"


@pytest.fixture
def log() -> io.StringIO:
    stream = io.StringIO()
    log_to(stream)
    return stream


def test_the_log_tells_what_happened_and_none_of_the_text(served: Served, log: io.StringIO) -> None:
    for i, body in enumerate((SHORT, {**SHORT, "stream": True}, {**SHORT, "top_p": 7})):
        served.post(CHAT, body, headers={"x-request-id": f"logged-{i}"})
    until(lambda: log.getvalue().count("logged-") == 3)  # a line is written once its reply is out
    found = [json.loads(line) for line in log.getvalue().splitlines()]
    lines = sorted((line for line in found if "logged-" in line["request_id"]), key=lambda line: line["request_id"])
    assert [line["status"] for line in lines] == [200, 200, 400]
    assert lines[0]["completion_tokens"] == lines[1]["completion_tokens"] == 3
    assert lines[0]["outcome"] == ["length"]
    assert "secret" not in log.getvalue()


def test_what_is_not_http_leaves_a_line_of_the_log_like_any_other(served: Served, log: io.StringIO) -> None:
    address = httpx.URL(served.url)
    with socket.create_connection((address.host, address.port or 80), timeout=60) as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 400")
    until(lambda: "Invalid HTTP" in log.getvalue())
    (line,) = [json.loads(line) for line in log.getvalue().splitlines()]
    assert line["level"] == "warning"


def test_a_drafter_of_no_use_is_named_once(log: io.StringIO) -> None:
    body = {**SHORT, "max_tokens": 80, "ignore_eos": True, "temperature": 1.2, "method": "dominotree", "budget": 2}
    with serving(tiny_pair()) as served:
        for seed in (1, 2):
            assert served.post(CHAT, {**body, "seed": seed}).status_code == 200
        served.wait_until_idle()
    assert log.getvalue().count("hardly ever right") == 1


def test_what_adaptive_learned_is_kept_for_the_next_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOMINOTREE_CACHE", str(tmp_path))
    pair = tiny_pair()
    assert pair.drafter is not None
    key = profile_key("tiny", pair.target, pair.drafter)
    replace(tiny_costs(0.0), key=key).save(profile_path(key))
    with serving(pair) as served:
        reply = served.post(CHAT, {**SHORT, "max_tokens": 30, "ignore_eos": True, "method": "adaptive"})
        assert reply.status_code == 200, reply.text
    assert calibration_path(key).exists()


def test_prompts_are_logged_when_asked_for(log: io.StringIO) -> None:
    with serving(tiny_pair(), Limits(context=512), Settings(grace_s=0, log_prompts=True)) as served:
        served.post(CHAT, SHORT)
    assert "secret question" in log.getvalue()


def test_metrics_count_what_was_done() -> None:
    with serving(tiny_pair(), Limits(max_batch=3, context=512)) as served:
        body = {**SHORT, "max_tokens": 20, "ignore_eos": True}
        counts = [served.post(CHAT, {**body, "n": 2}).json()["usage"], served.post(CHAT, body).json()["usage"]]
        served.post(CHAT, {**body, "stream": True})
        served.post(CHAT, {**body, "top_p": 9})
        text = served.get("/metrics").text
        until(lambda: served.metric("acceptance_length_count") == 4)
        assert served.metric("answers_total", outcome="length", method="lookuptree") == 4
        assert served.metric("generated_tokens_total") == 80
        assert served.metric("round_tokens_total") == 80 - 4
        assert served.metric("prompt_tokens_total") == 4 * counts[0]["prompt_tokens"]
        until(lambda: served.metric("http_requests_total", route=CHAT, status="200") == 3)
        until(lambda: served.metric("http_requests_total", route=CHAT, status="400") == 1)
        for name in (
            "queue_seconds",
            "time_to_first_token_seconds",
            "time_per_output_token_seconds",
            "acceptance_length",
        ):
            assert served.metric(f"{name}_count") == 4
            assert f"dominotree_{name}_bucket" in text
        assert served.metric("slots") == 3
        until(lambda: served.metric("running") == served.metric("waiting") == served.metric("kv_tokens") == 0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Limits(max_batch=0),
        lambda: Limits(max_queue=-1),
        lambda: Limits(timeout_s=0),
        lambda: Settings(api_key=" "),
        lambda: Settings(max_body=3),
        lambda: Limits(context=1),
        lambda: Limits(context=0),
        lambda: Settings(api_key="key\n"),
    ],
)
def test_settings_that_cannot_work_are_refused(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidRequest):
        make()


def test_the_log_says_what_was_refused_and_metrics_know_every_route(served: Served, log: io.StringIO) -> None:
    served.post(CHAT, {**SHORT, "top_p": 7}, headers={"x-request-id": "wrong-1"})
    served.get("/v1/models/tiny", headers={"x-request-id": "wrong-2"})
    until(lambda: log.getvalue().count("wrong-") == 2)
    refused, model = (json.loads(line) for line in log.getvalue().splitlines() if "wrong-" in line)
    assert (refused["code"], refused["param"]) == ("invalid_value", "top_p")
    assert model["path"] == "/v1/models/{model}"
    assert 'route="/v1/models/{model}"' in served.get("/metrics").text
