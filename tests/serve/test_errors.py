"""What cannot be served is refused before anything is sent, in OpenAI's shape, with the field's name."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from serve.conftest import Served

TOOLS = [{"type": "function", "function": {"name": "a"}}]
HELLO = [{"role": "user", "content": "hello"}]
CHAT = {"messages": HELLO, "max_tokens": 3}
TEXT = {"prompt": "hello", "max_tokens": 3}


def refused(reply: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


BAD = [
    ({"method": ""}, "method"),
    ({"stop": [str(i) for i in range(17)]}, "stop"),
    ({"top_p": 2}, "top_p"),
    ({"top_p": 0}, "top_p"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"n": 100}, "n"),
    ({"seed": "x"}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": 3}, "stop"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1000}}, "logit_bias"),
    ({"logit_bias": {"5": 1, "05": -1}}, "logit_bias"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 5e-324}, "repetition_penalty"),
    ({"min_p": 2}, "min_p"),
    ({"top_k": -2}, "top_k"),
    ({"method": "magic"}, "method"),
    ({"method": "adaptive"}, "method"),
    ({"method": "ar", "budget": 4}, "budget"),
    ({"method": "domino", "node_topk": 4}, "node_topk"),
    ({"budget": -1}, "budget"),
    ({"budget": 500}, "budget"),
    ({"frobnicate": 1}, "frobnicate"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"frob": True}}, "stream_options.frob"),
    ({"stream": "yes"}, "stream"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "frob"}}}}, "response_format"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("wrong", "param"), BAD)
def test_a_wrong_field_is_named(served: Served, wrong: dict[str, Any], param: str, stream: bool) -> None:
    streamed = {"stream": True} if stream and "stream" not in wrong and "stream_options" not in wrong else {}
    for path, good in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        found = str(refused(served.post(path, {**good, **streamed, **wrong}))["param"])
        assert found == param or found.startswith(f"{param}."), found


@pytest.mark.parametrize("name", ["audio", "functions", "service_tier", "modalities", "prediction", "guided_json"])
def test_what_other_servers_can_do_is_refused_by_name(served: Served, name: str) -> None:
    error = refused(served.post("/v1/chat/completions", {**CHAT, name: {"x": 1}}))
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "frob": 1}]}, "messages[0].frob"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content"),
        ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": HELLO, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": HELLO, "logprobs": 2}, "logprobs"),
        ({"messages": HELLO, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"messages": HELLO, "tools": [{"type": "frob"}]}, "tools[0].type"),
        ({"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
        ({"messages": HELLO, "tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"messages": HELLO, "tools": TOOLS, "tool_choice": 3}, "tool_choice"),
        (
            {"messages": HELLO, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "b"}}},
            "tool_choice",
        ),
        (
            {
                "messages": HELLO,
                "tools": TOOLS,
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
            "tool_choice",
        ),
        ({"messages": HELLO, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
def test_wrong_conversations_are_refused(served: Served, body: dict[str, Any], param: str) -> None:
    assert str(refused(served.post("/v1/chat/completions", body))["param"]).startswith(param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "x", "logprobs": 6}, "logprobs"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
        ({"prompt": "x", "echo": True}, "echo"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 3}, "best_of"),
        ({"prompt": ["x"] * 100}, "n"),
        ({"prompt": ["x"] * 100, "n": 100}, "prompt"),
    ],
)
def test_wrong_prompts_are_refused(served: Served, body: dict[str, Any], param: str) -> None:
    assert str(refused(served.post("/v1/completions", body))["param"]).startswith(param)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_refused_before_the_stream_begins(served: Served, stream: bool) -> None:
    long = "x" * 5000
    chat = refused(
        served.post("/v1/chat/completions", {"messages": [{"role": "user", "content": long}], "stream": stream})
    )
    text = refused(served.post("/v1/completions", {"prompt": ["ok", long], "stream": stream}))
    assert (chat["param"], text["param"]) == ("messages", "prompt")
    assert chat["code"] == text["code"] == "context_length_exceeded"
    assert served.engine.open == 0


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b"null", b"3", b'"x"', b"\xff\xfe", b'{"messages": [' * 3000, b'{"messages": NaN}'),
        json.dumps({"messages": [{"role": "user", "content": "\ud800"}]}).encode(),
        json.dumps({"\ud800": 1, "messages": HELLO}).encode(),
        b'{"messages": [{"role": "user", "content": "x"}], "top_p": NaN}',
    ],
)
def test_what_is_no_request_at_all_is_a_400(served: Served, content: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        headers = {"content-type": "application/json"}
        refused(httpx.post(served.url + path, content=content, headers=headers, timeout=60))
    assert served.post("/v1/chat/completions", CHAT).status_code == 200


def test_unknown_models_and_paths_are_404(served: Served) -> None:
    assert refused(served.post("/v1/chat/completions", {**CHAT, "model": "other"}), 404)["code"] == "model_not_found"
    assert refused(served.get("/v1/models/other"), 404)["param"] == "model"
    assert refused(served.get("/v1/frob"), 404)["code"] == "not_found"
    assert refused(served.get("/v1/chat/completions"), 405)["code"] == "method_not_allowed"


def test_the_official_client_raises_its_own_errors(served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        served.client.chat.completions.create(model="tiny", messages=HELLO, top_p=2)  # type: ignore[arg-type]
    assert wrong.value.param == "top_p"
    with pytest.raises(openai.NotFoundError):
        served.client.completions.create(model="other", prompt="x")


def test_logits_that_leave_no_token_fail_that_request_only(served: Served) -> None:
    from cli.conftest import VOCAB

    everything = {str(token): -100 for token in range(VOCAB)}
    assert served.post("/v1/chat/completions", {**CHAT, "logit_bias": everything}).status_code == 200  # -100 is no ban
    assert served.post("/v1/chat/completions", CHAT).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_only_json_is_read_so_that_no_web_page_can_send_requests(served: Served, kind: str) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        reply = httpx.post(served.url + path, content=json.dumps(CHAT), headers={"content-type": kind}, timeout=60)
        assert refused(reply, 415)["code"] == "unsupported_media_type"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_template_variables_may_have_any_name(served: Served, path: str) -> None:
    body = {"messages": HELLO, "chat_template_kwargs": {"self": 1, "text": 2, "environment": 3}}
    assert served.post(path, body).status_code == 200


def test_messages_say_what_forms_a_field_may_have(served: Served) -> None:
    error = refused(served.post("/v1/completions", {"prompt": None}))
    assert error["message"] == "prompt: Input should be a valid string or a valid list"
    error = refused(served.post("/v1/completions", {**TEXT, "stop": ["x"] * 17}))
    assert "at most 16" in error["message"]


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 100_000, b'{"seed": ' + b"1" * 5000 + b"}"])
def test_bodies_that_no_parser_takes_are_told_so(served: Served, content: bytes) -> None:
    reply = httpx.post(f"{served.url}/v1/completions", content=content, headers={"content-type": "application/json"})
    error = refused(reply)
    assert error["code"] == "invalid_json"
    assert error["message"].startswith("the body is not valid JSON")


def test_a_stop_string_that_the_end_completes_is_the_reason(served: Served) -> None:
    pair = served.engine.pair
    assert pair.codec is not None
    half = pair.codec.encode("é")[0]  # the first byte of a character, which is never completed
    body = {"prompt": "Hi", "max_tokens": 3, "temperature": 0, "logit_bias": {str(half): 100}, "stop": "\ufffd"}
    found = served.post("/v1/completions", body).json()["choices"][0]
    assert (found["text"], found["finish_reason"]) == ("", "stop")
