"""Calls of tools: told as the API wants them, streamed or whole; what is no call stays text."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.conftest import TEMPLATE, byte_tokenizer
from dominotree.errors import InvalidRequest
from dominotree.serve.app import Settings
from dominotree.serve.engine import Event, Limits
from dominotree.serve.protocol import FunctionTool, call_schema
from dominotree.serve.tools import ToolReader, tool_format
from dominotree.text import TextCodec
from serve.conftest import Served, say, serving, tiny_pair

NAMES = ("look", "add")
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in NAMES
]
OFFER = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
HERMES = OFFER + '<tool_call>{\\"name\\": <function-name>, \\"arguments\\": <args>}</tool_call>' + TEMPLATE
LLAMA = OFFER + 'Respond in the format {"name": function name, "parameters": dictionary of arguments}.' + TEMPLATE
HELLO = [{"role": "user", "content": "hello"}]

LOOK = '<tool_call>\n{"name": "look", "arguments": {"at": "the 🦊 </tool_call> \\"sign\\""}}\n</tool_call>'
ADD = '<tool_call>{"name": "add", "arguments": {"x": [1, 2.5], "y": null}}</tool_call>'
LOOK_ARGUMENTS = {"at": 'the 🦊 </tool_call> "sign"'}
ADD_ARGUMENTS = {"x": [1, 2.5], "y": None}

HERMES_TEXTS: list[tuple[str, str | None, list[str]]] = [  # what is written, the text, the names called
    ("just text, as it is. \n", "just text, as it is. \n", []),
    (LOOK, "", ["look"]),
    (f"I look first. \n{LOOK}\n{ADD}\n", "I look first.", ["look", "add"]),
    (f"{LOOK}\n\nThat was it. ", "\n\nThat was it.", ["look"]),
    ('<tool_call>{"name": "add", "arguments": {}}', "", ["add"]),
    ('<tool_call>{"name": "add", "arguments": "{\\"x\\": 1}"}</tool_call>', "", ["add"]),
    ('<tool_call>{"name": "other", "arguments": {}}</tool_call>', None, []),
    ('<tool_call>{"name": "add"}</tool_call> ', None, []),
    ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', None, []),
    ('<tool_call>{"name": "add", "arguments": {"x": 1e999}}</tool_call>', None, []),
    ('<tool_call>{"name": "add", "arguments": ' + '{"x":' * 3000 + "</tool_call>", None, []),
    ('a <tool_call> is <tool_call >no</tool_call> "call', None, []),
    ("it ends <tool_c", None, []),
    ('<tool_call>{"broken}</tool_call>\n' + ADD, '<tool_call>{"broken}</tool_call>', ["add"]),
    ("<tool_call>" + LOOK, "<tool_call>", ["look"]),
]
LLAMA_TEXTS: list[tuple[str, str | None, list[str]]] = [
    ('{"name": "look", "parameters": {"at": "}"}}', "", ["look"]),
    ('<|python_tag|>{"type": "function", "name": "add", "parameters": {}}\n', "", ["add"]),
    ('{"name": "look", "parameters": {}}; {"name": "add", "parameters": {"x": 1}} ', "", ["look", "add"]),
    ('{"name": "look", "arguments": {}}\n{"name": "look", "arguments": {}}', "", ["look", "look"]),
    ('{"name": "look", "parameters": {}}; then we see', "; then we see", ["look"]),
    ("just text. ", None, []),
    ('It is {"name": "look", "parameters": {}}', None, []),
    ('{"name": "other", "parameters": {}} ', None, []),
    ('{"name": "look", "parameters": {', None, []),
    ("{ braces } of code", None, []),
    ("<|python_tag|>print(1)", None, []),
    (" \n", None, []),
]
ALL_TEXTS = [("hermes", *case) for case in HERMES_TEXTS] + [("llama", *case) for case in LLAMA_TEXTS]


def read(form: str, pieces: Sequence[str], reason: Any = "stop") -> list[Event]:
    reader = ToolReader(form, NAMES)
    return [reader.read(Event(piece)) for piece in pieces] + [reader.read(Event(finish_reason=reason))]


def parts(events: Sequence[Event]) -> tuple[str, list[tuple[str, str]]]:
    calls = [call for event in events for call in event.calls]
    assert [call.index for call in calls] == list(range(len(calls)))
    assert len({call.id for call in calls}) == len(calls)
    return "".join(event.text for event in events), [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize(("form", "written", "text", "called"), ALL_TEXTS)
def test_calls_are_found_however_the_text_is_cut(form: str, written: str, text: str | None, called: list[str]) -> None:
    whole = parts(read(form, [written]))
    assert whole[0] == (written if text is None else text)
    assert [name for name, _ in whole[1]] == called
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in whole[1])
    assert parts(read(form, list(written))) == whole
    for size in (2, 3, 7, 20):
        assert parts(read(form, [written[i : i + size] for i in range(0, len(written), size)])) == whole


@given(
    st.sampled_from(["hermes", "llama"]),
    st.lists(st.sampled_from([*'<>{}"\\ \n;ax', "<tool_call>", "</tool_call>", ADD, ADD[11:-12], "<|python_tag|>"])),
    st.lists(st.integers(0, 200)),
)
@settings(deadline=None, max_examples=300)
def test_cuts_never_matter_and_without_a_call_nothing_changes(form: str, bits: list[str], cuts: list[int]) -> None:
    written = "".join(bits)
    places = [0, *sorted(cut for cut in cuts if cut < len(written)), len(written)]
    whole = parts(read(form, [written]))
    assert parts(read(form, [written[a:b] for a, b in itertools.pairwise(places)])) == whole
    if not whole[1]:
        assert whole[0] == written


def test_text_is_shown_as_it_comes_and_calls_once_complete() -> None:
    reader = ToolReader("hermes", NAMES)
    assert reader.read(Event("I see <b> ")).text == "I see <b>"
    assert reader.read(Event("now <tool")).text == " now"
    assert reader.read(Event("s>")).text == " <tools>"
    held = reader.read(Event(ADD[:-1]))
    assert (held.text, list(held.calls)) == ("", [])
    assert [call.name for call in reader.read(Event(ADD[-1])).calls] == ["add"]


def test_an_answer_that_was_cut_off_says_so() -> None:
    assert read("hermes", [ADD])[-1].finish_reason == "tool_calls"
    assert read("hermes", [ADD], "length")[-1].finish_reason == "length"
    assert read("hermes", ["text"])[-1].finish_reason == "stop"


def codec(template: str | None, *special: str) -> TextCodec:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(list(special))
    return TextCodec(tokenizer, template)


def test_the_template_shows_the_format() -> None:
    assert tool_format("auto", codec(HERMES)) == "hermes"
    assert tool_format("auto", codec(HERMES, "<tool_call>")) == "llama"  # the marks are not in the text
    assert tool_format("auto", codec(LLAMA)) == "llama"
    assert tool_format("auto", codec(TEMPLATE + "<|python_tag|>")) == "llama"
    assert tool_format("auto", codec(HERMES + "<function=name>")) == "none"
    assert tool_format("auto", codec(TEMPLATE)) == tool_format("auto", codec(None)) == "none"
    assert tool_format("llama", codec(HERMES)) == "llama"
    with pytest.raises(InvalidRequest, match="tool format 'xml' is unknown; one of auto, hermes, llama, none"):
        tool_format("xml", codec(HERMES))


# Through the official client


@pytest.fixture(scope="module")
def hermes() -> Iterator[Served]:
    with serving(with_template(HERMES)) as made:
        yield made


def with_template(template: str) -> Any:
    pair = tiny_pair()
    assert pair.codec is not None
    pair.codec.template = template
    return pair


def ask(served: Served, **options: Any) -> Any:
    given = {"model": "tiny", "messages": HELLO, "tools": TOOLS, "max_tokens": 400, **options}
    return served.client.chat.completions.create(**given)


def joined(chunks: Sequence[Any]) -> tuple[str, list[tuple[str, str]], str]:
    """Put together as the client's documentation says: by index, arguments appended."""
    text, calls, ids, reason = "", {}, set(), ""  # type: ignore[var-annotated]
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        text += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            name, arguments = calls.get(call.index, ("", ""))
            calls[call.index] = name + (call.function.name or ""), arguments + (call.function.arguments or "")
            ids.add(call.id)
        reason = choice.finish_reason or reason
    assert len(ids) == len(calls)
    return text, [calls[i] for i in sorted(calls)], reason


@pytest.mark.parametrize("method", ["ar", "dominotree"])
def test_a_stream_joins_to_the_whole_answer(hermes: Served, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    say(monkeypatch, f"I look. {LOOK}\n{ADD}")
    options = {"logprobs": True, "extra_body": {"method": method, "return_trace": True}}
    choice = ask(hermes, **options).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    calls = choice.message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("look", LOOK_ARGUMENTS),
        ("add", ADD_ARGUMENTS),
    ]
    assert all(call.type == "function" and call.id.startswith("call_") for call in calls)
    chunks = list(ask(hermes, stream=True, **options))
    whole = [(call.function.name, call.function.arguments) for call in calls]
    assert joined(chunks) == (choice.message.content, whole, choice.finish_reason)
    told = [entry for chunk in chunks for c in chunk.choices if c.logprobs for entry in c.logprobs.content]
    assert [entry.token for entry in told] == [entry.token for entry in choice.logprobs.content]
    assert bytes(b for entry in told for b in entry.bytes).decode() == f"I look. {LOOK}\n{ADD}"


def test_text_alone_is_an_answer_as_ever(hermes: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, "no <tool_call> today \n")
    choice = ask(hermes).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("no <tool_call> today \n", "stop")
    assert choice.message.tool_calls is None
    assert joined(list(ask(hermes, stream=True))) == ("no <tool_call> today \n", [], "stop")


def test_a_call_without_text_has_no_content(hermes: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, ADD)
    message = ask(hermes).choices[0].message
    assert message.content is None and len(message.tool_calls) == 1


@pytest.mark.parametrize(
    "options", [{"tools": TOOLS, "tool_choice": "none"}, {"tools": TOOLS[:1]}, {"tools": []}], ids=str
)
def test_only_what_was_offered_can_be_called(
    hermes: Served, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    say(monkeypatch, ADD)
    choice = ask(hermes, **options).choices[0]
    assert (choice.message.content, choice.finish_reason) == (ADD, "stop")


def test_json_that_a_schema_asked_for_is_no_call() -> None:
    with serving(with_template(LLAMA)) as served:
        schema = {
            "type": "object",
            "properties": {"name": {"const": "add"}, "parameters": {"type": "object", "additionalProperties": False}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        choice = ask(served, response_format=format, seed=1).choices[0]
        assert choice.finish_reason == "stop" and json.loads(choice.message.content)["name"] == "add"


ARGUMENTS = {
    "type": "object",
    "properties": {"unit": {"$ref": "#/$defs/unit"}, "often": {"type": "boolean"}},
    "required": ["unit", "often"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["km", "mile"]}},
}
FORCED = [
    {"type": "function", "function": {"name": "far", "parameters": ARGUMENTS}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest.mark.parametrize("method", ["ar", "dominotree"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_call_can_be_forced(hermes: Served, method: str, temperature: float) -> None:
    """The tiny model writes noise; its calls are well formed all the same, and those of plain decoding."""
    for choice, names in (("required", {"far", "now"}), ({"type": "function", "function": {"name": "far"}}, {"far"})):
        asked = {"tools": FORCED, "tool_choice": choice, "temperature": temperature, "seed": 3}
        found = ask(hermes, **asked, extra_body={"method": method}).choices[0]
        (call,) = found.message.tool_calls
        assert found.message.content is None and found.finish_reason == "tool_calls"
        assert call.function.name in names
        arguments = json.loads(call.function.arguments)
        if call.function.name == "far":
            assert arguments["unit"] in ("km", "mile") and isinstance(arguments["often"], bool)
        else:
            assert arguments == {}
        plain = ask(hermes, **asked, extra_body={"method": "ar"}).choices[0].message.tool_calls[0]
        assert call.function == plain.function
        told = joined(list(ask(hermes, **asked, extra_body={"method": method}, stream=True)))
        assert told == ("", [(call.function.name, call.function.arguments)], "tool_calls")


def forced(served: Served, *parameters: Any) -> httpx.Response:
    """The reply when one of tools with such parameters must be called."""
    functions = [{"name": f"tool{i}", "parameters": one} for i, one in enumerate(parameters)]
    tools = [{"type": "function", "function": function} for function in functions]
    body = {"messages": HELLO, "tools": tools, "tool_choice": "required", "seed": 2, "temperature": 1}
    return served.post("/v1/chat/completions", body)


def test_tools_keep_their_own_definitions(hermes: Served) -> None:
    for unit in ("inch", "mile"):
        other = {**ARGUMENTS, "$defs": {"unit": {"enum": [unit]}}}
        reply = forced(hermes, other) if unit == "inch" else forced(hermes, other, {**other, "$defs": {"unit": {}}})
        (call,) = reply.json()["choices"][0]["message"]["tool_calls"]
        if call["function"]["name"] == "tool0":
            assert json.loads(call["function"]["arguments"])["unit"] == unit


def test_references_of_a_tool_count_from_its_own_parameters(hermes: Served) -> None:
    leaf = {"enum": ["end"]}
    within = {
        "type": "object",
        "properties": {"y": leaf, "x": {"$ref": "#/properties/y"}},
        "required": ["x", "y"],
        "additionalProperties": False,
    }
    nested = {
        "type": "object",
        "properties": {"x": {"anyOf": [leaf, {"$ref": "#"}]}},
        "required": ["x"],
        "additionalProperties": False,
    }
    for parameters in (within, nested):
        (call,) = forced(hermes, parameters).json()["choices"][0]["message"]["tool_calls"]
        found = json.loads(call["function"]["arguments"])["x"]
        while isinstance(found, dict):
            found = found["x"]
        assert found == "end"


def test_a_parameter_may_be_called_like_a_keyword(hermes: Served) -> None:
    named = {
        "type": "object",
        "properties": {name: {"$ref": "#/$defs/unit"} for name in ("default", "enum", "const", "examples")},
        "required": ["default", "enum", "const", "examples"],
        "additionalProperties": False,
        "$defs": {"unit": {"enum": ["km", "mile"]}},
    }
    (call,) = forced(hermes, named).json()["choices"][0]["message"]["tool_calls"]
    assert set(json.loads(call["function"]["arguments"]).values()) <= {"km", "mile"}


def test_parameters_that_are_nested_too_deep_are_refused() -> None:
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(1500):
        deep = {"type": "object", "properties": {"x": deep}}
    with pytest.raises(InvalidRequest, match="nested too deep"):
        call_schema([FunctionTool.model_construct(name="far", parameters=deep)])


@pytest.mark.parametrize(
    "parameters",
    [{"type": "string"}, {"$defs": 5}, {"type": "object", "$defs": None}, {"definitions": ["x"]}, {"type": ["object"]}],
)
def test_parameters_that_are_no_objects_force_no_call(hermes: Served, parameters: dict[str, Any]) -> None:
    reply = forced(hermes, parameters)
    if reply.status_code == 200:  # tables that nothing refers to may be anything
        assert reply.json()["choices"][0]["message"]["tool_calls"]
    else:
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "tools"


def test_every_choice_has_its_own_calls(hermes: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, ADD)
    choices = ask(hermes, n=2).choices
    assert [len(choice.message.tool_calls) for choice in choices] == [1, 1]
    assert choices[0].message.tool_calls[0].id != choices[1].message.tool_calls[0].id


def test_the_format_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    written = '{"name": "add", "parameters": {"x": 1}}'
    for form, found in (("llama", 1), ("none", 0)):
        settings = Settings(grace_s=0, tool_format=form)
        with monkeypatch.context() as patch, serving(with_template(HERMES), Limits(context=512), settings) as served:
            say(patch, written)
            choice = ask(served).choices[0]
            assert len(choice.message.tool_calls or []) == found
            assert choice.message.content == (None if found else written)


def test_calls_and_results_can_be_sent_back(hermes: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}"
    )
    template += "{% endfor %}{{ m.content }}|{% endfor %}" + OFFER
    assert hermes.engine.pair.codec is not None
    monkeypatch.setattr(hermes.engine.pair.codec, "template", template)
    with monkeypatch.context() as patch:
        say(patch, LOOK)
        message = ask(hermes).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "a tree"}
    turn = [*HELLO, message.model_dump(exclude_unset=True), result]
    found = hermes.post("/tokenize", {"messages": turn}).json()["tokens"]
    shown = hermes.engine.pair.codec.decode(found)
    assert f"assistant:{json.dumps(LOOK_ARGUMENTS, ensure_ascii=False)}" in shown and "tool:a tree|" in shown
    assert ask(hermes, messages=turn, max_tokens=3).choices[0].finish_reason
