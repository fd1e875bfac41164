"""Text completions: every kind of prompt, and the older form of log-probabilities."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cli.conftest import byte_tokenizer
from dominotree.sampling import SamplingParams
from serve.conftest import Served, say

IDS = byte_tokenizer().encode("hello").ids


def ask(served: Served, **options: Any) -> Any:
    return served.client.completions.create(**{"model": "tiny", "prompt": "hello", "max_tokens": 12, **options})


def test_text_and_token_ids_are_the_same_prompt(served: Served) -> None:
    whole = ask(served, seed=1)
    plain = served.engine.pair.generate(
        IDS, method="ar", sampling=SamplingParams(temperature=1.0, seed=1, max_new_tokens=12)
    )
    assert whole.choices[0].text == plain.text
    assert ask(served, seed=1, prompt=IDS).choices[0].text == plain.text
    assert whole.object == "text_completion" and whole.usage.prompt_tokens == len(IDS)


def test_several_prompts_are_answered_in_order_each_with_its_choices(served: Served) -> None:
    several = ask(served, prompt=["hello", "other"], n=2, seed=7)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    alone = [ask(served, prompt=prompt, seed=seed) for prompt in ("hello", "other") for seed in (7, 8)]
    assert [c.text for c in several.choices] == [one.choices[0].text for one in alone]
    assert several.usage.prompt_tokens == 2 * len(IDS)
    ids = [byte_tokenizer().encode(text).ids for text in ("hello", "other")]
    assert [c.text for c in ask(served, prompt=ids, n=2, seed=7).choices] == [c.text for c in several.choices]


def test_streams_join_to_the_whole_answer(served: Served) -> None:
    whole = ask(served, prompt=["hello", "other"], seed=3)
    chunks = list(ask(served, prompt=["hello", "other"], seed=3, stream=True, stream_options={"include_usage": True}))
    for i in range(2):
        pieces = [c.text for chunk in chunks for c in chunk.choices if c.index == i]
        assert "".join(pieces) == whole.choices[i].text
    assert chunks[-1].choices == [] and chunks[-1].usage.model_dump() == {
        **whole.usage.model_dump(),
        "prompt_tokens_details": chunks[-1].usage.prompt_tokens_details.model_dump(),
    }


def test_an_unset_limit_is_short_as_clients_expect(served: Served) -> None:
    reply = served.post("/v1/completions", {"prompt": "hello", "ignore_eos": True})
    assert reply.json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs_in_the_older_form(served: Served, count: int) -> None:
    found = ask(served, seed=2, logprobs=count, extra_body={"ignore_eos": True}).choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset) == 12
    assert all(math.isfinite(logprob) and logprob <= 0 for logprob in found.token_logprobs)
    assert len(found.top_logprobs) == (12 if count else 0)
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=False):
        assert top[token] == logprob
        assert count <= len(top) <= count + 1
    assert ask(served, seed=2).choices[0].logprobs is None


def test_offsets_point_into_the_text(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, "a🦊b")
    choice = ask(served, logprobs=1).choices[0]
    assert choice.text == "a🦊b"
    assert choice.logprobs.text_offset == [0, 1, 1, 1, 1, 2]
    assert choice.logprobs.tokens[0] == "a" and choice.logprobs.tokens[1].startswith("bytes:")


def test_an_empty_text_begins_from_nothing(served: Served) -> None:
    for prompt in ("", [""]):
        reply = served.post("/v1/completions", {"prompt": prompt, "max_tokens": 2})
        assert reply.status_code == 200 and reply.json()["usage"]["prompt_tokens"] == 1
