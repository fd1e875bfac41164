"""JSON that fits, whatever the method: equal to plain decoding under the same rule."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import validate

from dominotree.sampling import SamplingParams
from dominotree.serve.grammar import Grammars
from serve.conftest import Served

HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"anyOf": [{"$ref": "#"}]}])
def test_schemas_that_allow_nothing_at_all_are_refused(served: Served, schema: dict[str, Any]) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    reply = served.post("/v1/chat/completions", {"messages": HELLO, "response_format": wanted})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == "response_format"


def ask(served: Served, **options: Any) -> dict[str, Any]:
    body = {"messages": HELLO, "max_tokens": 400, "response_format": FORMAT, **options}
    reply = served.post("/v1/chat/completions", body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_answers_fit_the_schema_and_are_the_same_for_every_method(
    served: Served, seed: int, temperature: float
) -> None:
    codec, target = served.engine.pair.codec, served.engine.pair.target
    assert codec is not None
    prompt = served.engine.pair.prompt_ids(HELLO)
    rule = Grammars(codec, target.vocab_size, target.eos_token_ids).processors(SCHEMA, len(prompt), 1)
    sampling = SamplingParams(temperature=temperature, seed=seed, max_new_tokens=400, logits_processors=rule)
    plain = served.engine.pair.generate(prompt, method="ar", sampling=sampling)
    for method in ("ar", "dominotree", "domino", "ddtree"):
        choice = ask(served, seed=seed, temperature=temperature, method=method)["choices"][0]
        assert choice["message"]["content"] == plain.text
        assert choice["finish_reason"] == plain.finish_reason == "stop"
    validate(json.loads(plain.text), SCHEMA)


@pytest.mark.parametrize("temperature", [0, 1])
def test_nothing_is_verified_that_the_schema_rules_out(served: Served, temperature: float) -> None:
    codec, target = served.engine.pair.codec, served.engine.pair.target
    assert codec is not None
    matcher = Grammars(codec, target.vocab_size, target.eos_token_ids).processors(SCHEMA, 0, 1)[0]._matcher
    reply = ask(served, seed=1, temperature=temperature, return_trace=True, return_decoding_stats=True, budget=16)
    choice = reply["choices"][0]
    seen: list[int] = []
    verified = 0
    for entry in choice["trace"]:
        paths: dict[int, list[int]] = {-1: []}
        for i, node in enumerate(entry["nodes"]):
            paths[i] = [*paths[node["parent"]], node["id"]]
            assert matcher.validate_tokens([*seen, *paths[i]]) == len(seen) + len(paths[i])
            verified += 1
        seen += [token["id"] for token in entry["tokens"]]
    assert 0 < verified == choice["decoding"]["nodes"] < 16 * choice["decoding"]["rounds"]


def test_any_object_will_do_for_json_object(served: Served) -> None:
    reply = ask(served, response_format={"type": "json_object"}, n=3, seed=1, max_tokens=200)
    for choice in reply["choices"]:
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)
        else:
            assert choice["message"]["content"].lstrip().startswith("{")


def test_text_is_free(served: Served) -> None:
    free = ask(served, response_format={"type": "text"}, seed=1, max_tokens=20)
    body = {"messages": HELLO, "max_tokens": 20, "seed": 1}
    assert free["choices"] == served.post("/v1/chat/completions", body).json()["choices"]


def test_schemas_stream_and_go_with_other_options(served: Served) -> None:
    whole = ask(served, seed=2, top_p=0.9, frequency_penalty=0.2, logprobs=True)
    body = {"messages": HELLO, "max_tokens": 400, "response_format": FORMAT, "seed": 2, "top_p": 0.9}
    stream = served.post("/v1/chat/completions", {**body, "frequency_penalty": 0.2, "stream": True}).text
    chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    joined = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert joined == whole["choices"][0]["message"]["content"]
    validate(json.loads(joined), SCHEMA)
    raw = b"".join(bytes(entry["bytes"]) for entry in whole["choices"][0]["logprobs"]["content"])
    assert raw.decode() == joined


def test_the_openai_client_parses_what_it_asked_for(served: Served) -> None:
    reply = served.client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        response_format=FORMAT,
        max_tokens=400,
        seed=4,  # type: ignore[call-overload]
    )
    validate(json.loads(reply.choices[0].message.content), SCHEMA)


@pytest.mark.parametrize(
    "schema",
    [{"type": "frob"}, {"type": "object", "properties": 3}, {"$ref": "#/nowhere"}, {"type": "string", "pattern": "("}],
)
def test_schemas_that_cannot_be_held_are_refused(served: Served, schema: dict[str, Any]) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    reply = served.post("/v1/chat/completions", {"messages": HELLO, "response_format": format})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "response_format"


def test_an_answer_that_may_not_end_cannot_have_a_schema(served: Served) -> None:
    body = {"messages": HELLO, "response_format": FORMAT, "ignore_eos": True}
    assert served.post("/v1/chat/completions", body).json()["error"]["param"] == "ignore_eos"
