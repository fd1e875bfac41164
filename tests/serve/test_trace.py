"""The trace of an answer: nothing of it unasked, and what it tells adds up to the answer of plain decoding."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from dominotree.generation import STAGES, Request
from dominotree.sampling import SamplingParams
from oracle import OracleDrafter
from serve.conftest import END, Served, say, serving, tiny_pair

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def guided() -> Iterator[Served]:
    """A server whose drafter is often right about the greedy answer to HELLO."""
    pair = tiny_pair()
    plain = pair.generate(HELLO, method="ar", max_new_tokens=40, ignore_eos=True)
    script = pair.prompt_ids(HELLO) + plain.token_ids
    drafter = OracleDrafter(pair.target, [script] * 8, right=0.6, sibling=0.2, wrong=0.2)
    with serving(tiny_pair(drafter=drafter)) as made:
        yield made


def ask(served: Served, path: str = CHAT, **options: Any) -> dict[str, Any]:
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    reply = served.post(path, {**prompt, "max_tokens": 40, "ignore_eos": True, **options})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def ask_streamed(served: Served, path: str = CHAT, **options: Any) -> list[dict[str, Any]]:
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    reply = served.post(path, {**prompt, "max_tokens": 40, "ignore_eos": True, "stream": True, **options})
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def ids(trace: list[dict[str, Any]]) -> list[int]:
    return [token["id"] for entry in trace for token in entry["tokens"]]


def trace_of(chunks: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    return [e for c in chunks for choice in c["choices"] if choice["index"] == index for e in choice.get("trace", [])]


def shape(value: Any) -> Any:
    """The keys of a reply, all the way down, in their order."""
    if isinstance(value, dict):
        return {key: shape(part) for key, part in value.items()}
    return [shape(part) for part in value] if isinstance(value, list) else type(value).__name__


PLAIN_CHUNK = {"id": "str", "object": "str", "created": "int", "model": "str", "system_fingerprint": "str"}


@pytest.mark.parametrize("off", [{}, {"return_trace": False}, {"return_trace": None}])
def test_unasked_nothing_of_it_shows(served: Served, off: dict[str, Any]) -> None:
    chunks = ask_streamed(served, seed=1, **off)
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert shape({**chunk, "choices": None}) == {**PLAIN_CHUNK, "choices": "NoneType"}
        assert list(choice) == ["index", "delta", "logprobs", "finish_reason"]
        assert set(choice["delta"]) <= {"role", "content"}
        assert choice["delta"] or choice["finish_reason"]
    whole = ask(served, seed=1, **off)
    assert list(whole["choices"][0]) == ["index", "message", "logprobs", "finish_reason"]
    assert list(ask(served, TEXT, **off)["choices"][0]) == ["index", "text", "logprobs", "finish_reason"]


def test_asked_for_it_changes_nothing_else(served: Served) -> None:
    plain = ask(served, seed=1, temperature=1)
    traced = ask(served, seed=1, temperature=1, return_trace=True)
    assert traced["choices"][0].pop("trace")
    assert (traced["choices"], traced["usage"]) == (plain["choices"], {**plain["usage"], **traced["usage"]})


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("method", ["lookuptree", "dominotree", "domino", "ddtree", "ar"])
def test_the_rounds_are_the_answer_of_plain_decoding(
    served: Served, path: str, temperature: float, method: str
) -> None:
    options = {"seed": 5, "temperature": temperature, "method": method, "return_trace": True}
    chunks = ask_streamed(served, path, **options)
    trace = trace_of(chunks)
    sampling = SamplingParams(temperature=temperature, seed=5, max_new_tokens=40, ignore_eos=True)
    prompt, raw = (HELLO, {}) if path == CHAT else ("hello", {"raw": True})
    plain = served.engine.pair.generate(prompt, method="ar", sampling=sampling, **raw)
    assert ids(trace) == plain.token_ids
    assert "".join(token["piece"] for entry in trace for token in entry["tokens"]) == plain.text
    whole = ask(served, path, **options)
    assert ids(whole["choices"][0]["trace"]) == plain.token_ids
    assert [e["round"] for e in trace] == list(range(len(trace))) == [e["round"] for e in whole["choices"][0]["trace"]]


def check_round(entry: dict[str, Any], before: dict[str, Any], budget: int) -> None:
    nodes, path, tokens = entry["nodes"], entry["path"], entry["tokens"]
    assert entry["root"]["id"] == before["tokens"][-1]["id"]
    assert len(nodes) <= budget
    for place, node in enumerate(nodes):
        assert -1 <= node["parent"] < place
        above = nodes[node["parent"]] if node["parent"] >= 0 else None
        assert node["depth"] == (0 if above is None else above["depth"] + 1)
        assert 0 <= node["prob"] <= 1  # 0: the text itself proposed it
        assert node["score"] <= (0 if above is None else above["score"]) + 1e-3
    at = -1
    for node, token in zip(path, tokens, strict=False):
        assert nodes[node]["parent"] == at
        assert (nodes[node]["id"], nodes[node]["text"]) == (token["id"], token["text"])
        at = node
    assert len(tokens) == len(path) + 1
    assert list(entry["ms"]) == list(STAGES)
    assert all(spent >= 0 for spent in entry["ms"].values()) and entry["ms"]["verify"] > 0


@pytest.mark.parametrize(
    "options", [{"budget": 6}, {"budget": 0}, {"method": "domino"}, {"method": "dominotree", "node_topk": 2}]
)
def test_what_was_accepted_is_a_path_of_the_tree(guided: Served, options: dict[str, Any]) -> None:
    whole = ask(guided, temperature=0, return_trace=True, return_decoding_stats=True, **options)
    first, *rounds = whole["choices"][0]["trace"]
    assert first["root"] is None and first["nodes"] == first["path"] == []
    assert len(first["tokens"]) == 1 and list(first["ms"]) == ["prefill"]
    for before, entry in zip([first, *rounds], rounds, strict=False):
        check_round(entry, before, options.get("budget", 16))
    figures = whole["choices"][0]["decoding"]
    assert (figures["accepted_drafts"] > 5) == (options.get("budget") != 0)
    assert ids([first, *rounds]) == guided.engine.decoder.drafter.scripts[0][-40:]
    assert len(rounds) == figures["rounds"]
    assert sum(len(entry["nodes"]) for entry in rounds) == figures["nodes"]
    assert sum(len(entry["path"]) for entry in rounds) == figures["accepted_drafts"]
    spent = sum(sum(entry["ms"].values()) for entry in rounds) / 1000
    assert 0 < spent <= figures["decode_s"] + 1e-3


def test_plain_decoding_has_rounds_without_a_tree(served: Served) -> None:
    _, *rounds = ask(served, method="ar", return_trace=True)["choices"][0]["trace"]
    assert len(rounds) == 39
    assert all(entry["nodes"] == [] and entry["path"] == [] and len(entry["tokens"]) == 1 for entry in rounds)


def test_every_choice_has_its_own(served: Served) -> None:
    chunks = ask_streamed(served, n=3, seed=11, temperature=1, return_trace=True)
    alone = [ask(served, seed=11 + i, temperature=1, return_trace=True)["choices"][0]["trace"] for i in range(3)]
    assert [ids(trace_of(chunks, i)) for i in range(3)] == [ids(trace) for trace in alone]


def test_only_the_request_that_asks_has_it_in_a_shared_batch(served: Served) -> None:
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda i: ask(served, seed=i, return_trace=i % 2 == 0), range(4)))
    assert ["trace" in reply["choices"][0] for reply in replies] == [True, False, True, False]


def test_a_character_that_spans_tokens_comes_with_its_last(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "é🦊 你"
    said = say(monkeypatch, text)
    chunks = ask_streamed(served, return_trace=True, temperature=1, ignore_eos=False)
    tokens = [token for entry in trace_of(chunks) for token in entry["tokens"]]
    assert [token["id"] for token in tokens] == said
    assert [token["piece"] for token in tokens] == ["", "é", "", "", "", "🦊", " ", "", "", "你", ""]
    assert [token["text"] for token in tokens[:3]] == ["\\xc3", "\\xa9", "\\xf0"]
    assert tokens[-1] == {"id": END, "text": "<|end|>", "piece": ""}
    cut = ask(served, return_trace=True, temperature=1, max_tokens=3)["choices"][0]
    pieces = "".join(token["piece"] for entry in cut["trace"] for token in entry["tokens"])
    assert pieces == cut["message"]["content"] == "é\ufffd"


def test_a_stop_string_is_in_the_trace_and_nothing_behind_it(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, "hello world and more")
    reply = ask(served, return_trace=True, temperature=1, stop="wor", max_tokens=100)
    (choice,) = reply["choices"]
    assert choice["message"]["content"] == "hello "
    found = ids(choice["trace"])
    assert bytes(served.engine.names.bytes_of(token)[0] for token in found) == b"hello wor"
    assert len(found) == reply["usage"]["completion_tokens"]


def test_it_must_be_a_truth_value(served: Served) -> None:
    refused = served.post(CHAT, {"messages": HELLO, "return_trace": "yes"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "return_trace"


def test_the_official_client_hands_it_on(served: Served) -> None:
    chunks = list(
        served.client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=8, stream=True, extra_body={"return_trace": True}
        )
    )
    rounds = [entry for chunk in chunks for entry in getattr(chunk.choices[0], "trace", None) or []]
    assert sum(len(entry["tokens"]) for entry in rounds) <= 8
    assert [entry["round"] for entry in rounds] == list(range(len(rounds)))


def test_a_neighbour_that_fails_leaves_the_trace_whole() -> None:
    pair, seen = tiny_pair(), []
    prompt, calls = pair.prompt_ids(HELLO), iter(range(99))

    def breaks(_: Any, logits: Any) -> Any:
        if next(calls) == 3:
            raise RuntimeError("a processor's own fault")
        return logits

    sampling = SamplingParams(max_new_tokens=30, ignore_eos=True)
    good = Request(prompt, sampling, recorder=seen.append)
    bad = Request(prompt, replace(sampling, logits_processors=(breaks,)))
    decoder = pair.decoder([good, bad])
    broken, whole = decoder.add(bad), decoder.add(good)
    with pytest.raises(RuntimeError):
        while not whole.finished:
            decoder.step()
    while not whole.finished:
        decoder.step()
    assert broken.finish_reason == "abort"
    assert len(seen) == whole.stats.rounds
    assert [token for done in seen for token in done.tokens] == whole.new_tokens[1:]
    assert all(sum(done.stage_ms.values()) > 0 for done in seen)
