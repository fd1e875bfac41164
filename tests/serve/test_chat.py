"""Chat completions through the official client: streamed and whole answers are the same answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from cli.conftest import byte_tokenizer
from dominotree.sampling import SamplingParams
from serve.conftest import END, Served, say, tiny_pair

HELLO = [{"role": "user", "content": "hello"}]


def ask(served: Served, **options: Any) -> ChatCompletion:
    extra = {name: options.pop(name) for name in list(options) if name in EXTRA}
    given = {"model": "tiny", "messages": HELLO, "max_tokens": 24, **options}
    reply: ChatCompletion = served.client.chat.completions.create(**given, extra_body=extra)
    return reply


EXTRA = {"return_decoding_stats", "method", "budget", "top_k", "min_p", "repetition_penalty", "ignore_eos"}


def ask_streamed(served: Served, **options: Any) -> list[Any]:
    extra = {name: options.pop(name) for name in list(options) if name in EXTRA}
    given = {"model": "tiny", "messages": HELLO, "max_tokens": 24, **options}
    return list(served.client.chat.completions.create(**given, extra_body=extra, stream=True))


def joined(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"seed": 1},
        {"seed": 2, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
        {"seed": 3, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
        {"temperature": 0, "repetition_penalty": 1.3, "logit_bias": {"70": -100, "80": 3}},
        {"seed": 4, "method": "ar"},
        {"seed": 4, "method": "domino"},
        {"seed": 4, "budget": 3},
    ],
)
def test_a_stream_joins_to_the_whole_answer_which_is_that_of_plain_decoding(
    served: Served, options: dict[str, Any]
) -> None:
    whole = ask(served, **options)
    assert joined(ask_streamed(served, **options)) == whole.choices[0].message.content
    fields = {name: value for name, value in options.items() if name not in ("method", "budget")}
    fields["logit_bias"] = {int(token): bias for token, bias in options.get("logit_bias", {}).items()}
    fields.setdefault("temperature", 1.0)
    plain = served.engine.pair.generate(HELLO, method="ar", sampling=SamplingParams(max_new_tokens=24, **fields))
    assert whole.choices[0].message.content == plain.text
    assert whole.choices[0].finish_reason == plain.finish_reason
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == plain.stats.prompt_tokens
    assert whole.usage.completion_tokens == plain.stats.new_tokens
    assert whole.usage.total_tokens == plain.stats.prompt_tokens + plain.stats.new_tokens


TEXTS = ["the quick 🦊 jumps 👩‍👩‍👧‍👦!", "你好，世界", "plain ascii", "é🙂"]


@pytest.mark.parametrize("text", TEXTS)
def test_characters_that_span_tokens_arrive_whole(served: Served, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    ids = say(monkeypatch, text)
    chunks = ask_streamed(served, max_tokens=200)
    pieces = [c.delta.content for chunk in chunks for c in chunk.choices if c.delta.content]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    for cut in range(1, len(ids)):
        whole = ask(served, max_tokens=cut).choices[0]
        assert whole.message.content == byte_tokenizer().decode(ids[:cut])
        assert joined(ask_streamed(served, max_tokens=cut)) == whole.message.content
        assert whole.finish_reason == "length"


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("world", "hello "),
        (["rld", "o w"], "hell"),
        (["worldly", "worl"], "hello "),
        ("o", "hell"),
        ("hello world 🦊 and more", ""),
        ("🦊", "hello world "),
        (["nothing", "of this"], "hello world 🦊 and more"),
    ],
)
def test_no_part_of_a_stop_string_is_ever_shown(
    served: Served, monkeypatch: pytest.MonkeyPatch, stop: str | list[str], expected: str
) -> None:
    say(monkeypatch, "hello world 🦊 and more")
    whole = ask(served, stop=stop, max_tokens=100, logprobs=True, return_decoding_stats=True)
    choice = whole.choices[0]
    assert choice.message.content == expected
    assert choice.finish_reason == "stop"
    assert joined(ask_streamed(served, stop=stop, max_tokens=100)) == expected
    assert choice.logprobs is not None and choice.logprobs.content is not None
    raw = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content)
    assert raw.decode() == expected  # one token a byte: none is shown in part
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 1 + sum(
        (j + 1) * rounds
        for j, rounds in enumerate(choice.decoding["accepted_histogram"])  # type: ignore[attr-defined]
    )


def test_the_end_token_ends_the_answer_and_is_no_part_of_it(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, "ok")
    whole = ask(served, max_tokens=100, logprobs=True)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("ok", "stop")
    assert whole.usage is not None and whole.usage.completion_tokens == 3
    assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.content is not None
    assert [entry.token for entry in whole.choices[0].logprobs.content] == ["o", "k"]
    going_on = ask(served, max_tokens=5, ignore_eos=True)
    assert going_on.choices[0].finish_reason == "length"


def test_the_order_of_chunks_is_the_one_clients_know(served: Served) -> None:
    chunks = ask_streamed(served, seed=1)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] in ("stop", "length")
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)


def test_the_counts_come_in_a_last_chunk_only_when_asked_for(served: Served) -> None:
    whole = ask(served, seed=1)
    assert all(chunk.usage is None for chunk in ask_streamed(served, seed=1))
    chunks = ask_streamed(served, seed=1, stream_options={"include_usage": True})
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    body = {"messages": HELLO, "stream": True, "max_tokens": 3}
    lines = [line for line in served.post("/v1/chat/completions", body).text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    assert all("usage" not in json.loads(line.removeprefix("data: ")) for line in lines[:-1])


@pytest.mark.parametrize("temperature", [0, 1])
def test_every_choice_is_the_answer_of_its_own_seed(served: Served, temperature: float) -> None:
    together = ask(served, n=3, seed=11, temperature=temperature)
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    alone = [ask(served, seed=11 + i, temperature=temperature) for i in range(3)]
    texts = [choice.message.content for choice in together.choices]
    assert texts == [one.choices[0].message.content for one in alone]
    assert (len(set(texts)) == 1) == (temperature == 0)
    assert together.usage is not None
    assert together.usage.completion_tokens == sum(one.usage.completion_tokens for one in alone if one.usage)
    assert together.usage.prompt_tokens == (alone[0].usage.prompt_tokens if alone[0].usage else None)
    chunks = ask_streamed(served, n=3, seed=11, temperature=temperature)
    assert [joined(chunks, i) for i in range(3)] == texts


@pytest.mark.parametrize("temperature", [0, 1])
def test_logprobs_are_those_of_the_raw_distribution(served: Served, temperature: float) -> None:
    whole = ask(served, seed=5, temperature=temperature, logprobs=True, top_logprobs=5, ignore_eos=True)
    sampling = SamplingParams(temperature=temperature, seed=5, max_new_tokens=24, logprobs=5, ignore_eos=True)
    plain = served.engine.pair.generate(HELLO, method="ar", sampling=sampling)
    assert plain.logprobs is not None
    assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.content is not None
    content = whole.choices[0].logprobs.content
    assert len(content) == 24
    assert [entry.logprob for entry in content] == pytest.approx([found.logprob for found in plain.logprobs], abs=1e-4)
    for entry, found in zip(content, plain.logprobs, strict=True):
        assert len(entry.top_logprobs) == 5
        wanted = [logprob for _, logprob in found.top]
        assert [other.logprob for other in entry.top_logprobs] == pytest.approx(wanted, abs=1e-4)
    chunks = ask_streamed(served, seed=5, temperature=temperature, logprobs=True, top_logprobs=5, ignore_eos=True)
    choices = [chunk.choices[0] for chunk in chunks]
    streamed = [e for choice in choices if choice.logprobs for e in choice.logprobs.content]
    assert [(e.bytes, e.logprob) for e in streamed] == [(e.bytes, e.logprob) for e in content]


@pytest.mark.parametrize("top", [None, 0])
def test_without_alternatives_the_list_is_empty(served: Served, top: int | None) -> None:
    options = {} if top is None else {"top_logprobs": top}
    choice = ask(served, seed=1, logprobs=True, **options).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content
    assert all(entry.top_logprobs == [] for entry in choice.logprobs.content)
    assert ask(served, seed=1).choices[0].logprobs is None


def test_acceptance_figures_come_only_when_asked_for_and_add_up(served: Served) -> None:
    assert not hasattr(ask(served, seed=1).choices[0], "decoding")
    whole = ask(served, seed=1, return_decoding_stats=True, budget=5, ignore_eos=True)
    figures: dict[str, Any] = whole.choices[0].decoding  # type: ignore[attr-defined]
    assert (figures["method"], figures["budget"], figures["seed"]) == ("lookuptree", 5, 1)
    histogram = figures["accepted_histogram"]
    assert sum(histogram) == figures["rounds"]
    assert sum(j * rounds for j, rounds in enumerate(histogram)) == figures["accepted_drafts"]
    assert 1 + figures["rounds"] + figures["accepted_drafts"] == 24
    assert figures["mean_accepted"] == pytest.approx(23 / figures["rounds"], abs=1e-3)
    assert 0 < figures["nodes"] <= 5 * figures["rounds"]
    last = ask_streamed(served, seed=1, return_decoding_stats=True, budget=5, ignore_eos=True)[-1]
    assert last.choices[0].decoding["accepted_histogram"] == histogram
    plain = ask(served, seed=1, return_decoding_stats=True, method="ar").choices[0]
    assert plain.decoding["nodes"] == 0 and plain.decoding["budget"] is None  # type: ignore[attr-defined]


def test_one_token_and_a_fresh_seed_are_reported(served: Served) -> None:
    choice = ask(served, max_tokens=1, return_decoding_stats=True).choices[0]
    assert choice.decoding["rounds"] == 0 and choice.decoding["mean_accepted"] == 0  # type: ignore[attr-defined]
    assert isinstance(choice.decoding["seed"], int)  # type: ignore[attr-defined]


def test_all_forms_of_content_are_the_same_prompt(served: Served) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
    assert ask(served, seed=1, messages=parts).choices[0].message == ask(served, seed=1).choices[0].message
    system = ask(served, seed=1, messages=[{"role": "system", "content": "s"}, *HELLO])
    developer = ask(served, seed=1, messages=[{"role": "developer", "content": "s"}, *HELLO])
    assert system.choices[0].message == developer.choices[0].message


def test_an_answer_can_be_sent_back_as_it_came(served: Served) -> None:
    first = ask(served, seed=1).choices[0].message
    sent_back = [*HELLO, first.model_dump(), {"role": "user", "content": "go on"}]
    assert ask(served, seed=1, messages=sent_back).choices[0].finish_reason


def test_max_completion_tokens_counts_like_max_tokens(served: Served) -> None:
    reply = served.post("/v1/chat/completions", {"messages": HELLO, "max_completion_tokens": 4, "ignore_eos": True})
    assert reply.json()["usage"]["completion_tokens"] == 4


def test_an_answer_ends_where_the_context_does(served: Served) -> None:
    whole = ask(served, max_tokens=100000, ignore_eos=True, seed=1)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None and whole.usage.total_tokens == served.engine.decoder.context


def test_fields_that_only_label_are_taken(served: Served) -> None:
    labels = {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k"}
    nothing = {"audio": None, "functions": None, "store": False, "modalities": ["text"], "service_tier": "auto"}
    reply = served.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2, **labels, **nothing})
    assert reply.status_code == 200


def test_tools_reach_the_chat_template_or_are_refused(served: Served) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    refused = served.post("/v1/chat/completions", {"messages": HELLO, "tools": tools})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tools"
    pair = tiny_pair()
    assert pair.codec is not None
    codec, plain = served.engine.pair.codec, served.engine.pair.codec.template  # type: ignore[union-attr]
    assert codec is not None
    codec.template = "{% for t in tools %}[{{ t.function.name }}]{% endfor %}" + str(plain)
    try:
        found = served.post("/tokenize", {"messages": HELLO, "tools": tools}).json()["tokens"]
        assert codec.tokenizer.decode(found, skip_special_tokens=False).startswith("[look]")
        assert (
            served.post("/v1/chat/completions", {"messages": HELLO, "tools": tools, "max_tokens": 2}).status_code == 200
        )
    finally:
        codec.template = plain


def test_the_end_token_can_be_biased_away(served: Served) -> None:
    whole = ask(served, seed=1, logit_bias={str(END): -100}, max_tokens=60)
    assert whole.usage is not None and whole.usage.completion_tokens == 60
