"""The default pair behind the server, through the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import dominotree as dt
from dominotree.serve.engine import Limits
from serve.conftest import Served, serving

pytestmark = pytest.mark.pair

QUESTIONS = [
    "Why is the sky blue?",
    "Write a Python function that adds two numbers.",
    "用中文说你好。",
    "List three fruits 🍎.",
]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    pair = dt.load(dtype="float32", progress=False)
    with serving(pair, Limits(max_batch=4, context=1024)) as made:
        yield made


def ask(served: Served, question: str, **options: Any) -> Any:
    return served.client.chat.completions.create(
        model="smollm2-135m", messages=[{"role": "user", "content": question}], **{"max_tokens": 24, **options}
    )


def test_concurrent_streams_of_every_method_are_the_plain_answers(served: Served) -> None:
    expected = [
        served.engine.pair.generate(question, method="ar", max_new_tokens=24, temperature=t, seed=9)
        for question, t in zip(QUESTIONS, (0.0, 0.8, 0.0, 1.0), strict=True)
    ]

    def stream(i: int) -> tuple[str, str]:
        method = ("dominotree", "domino", "ddtree", "ar")[i % 4]
        options = {"temperature": (0, 0.8, 0, 1)[i % 4], "seed": 9, "extra_body": {"method": method}}
        chunks = list(ask(served, QUESTIONS[i % 4], stream=True, **options))
        text = "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices)
        return text, chunks[-1].choices[0].finish_reason

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(stream, range(8)))
    assert found == [(output.text, output.finish_reason) for output in expected] * 2


def test_json_of_a_schema_and_figures(served: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer"}},
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    reply = ask(
        served,
        "Name a big city and how many people live there, as JSON.",
        temperature=0,
        max_tokens=64,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
        extra_body={"return_decoding_stats": True},
    )
    choice = reply.choices[0]
    assert choice.finish_reason == "stop"
    assert set(json.loads(choice.message.content)) == {"city", "people"}
    assert choice.decoding["rounds"] >= 1
    assert reply.usage.prompt_tokens_details.cached_tokens >= 0
