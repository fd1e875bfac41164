"""Streams show whole characters, never part of a stop string, and add up to the one-shot text."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dominotree.errors import InvalidRequest
from dominotree.text import TextCodec, TextStream


def byte_tokenizer() -> Tokenizer:
    """Every byte a token, and a few longer ones that end in the middle of a character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    merges = []
    for text in ("th", "the", " t", "lo", "hel", "a\u00f0", "\u0141"):
        if len(text) == 2 and all(c in vocab for c in text):
            vocab[text] = len(vocab)
            merges.append((text[0], text[1]))
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "<end>"])
    return tokenizer


CODEC = TextCodec(byte_tokenizer(), "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}assistant:")
TEXTS = ["the quick 🦊 jumps", "你好，世界! hello", "a🇩🇪b👩‍👩‍👧‍👦c", "", "ascii only", "é" * 9 + "🙂🙂"]


def stream(ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    made = TextStream(CODEC, stop)
    pieces = []
    for token in ids:
        stopped = made.push(token)
        pieces.append(made.take())
        if stopped:
            break
    made.finish()
    pieces.append(made.take(final=True))
    return pieces, made


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_one_shot_text_wherever_the_tokens_are_cut(text: str) -> None:
    ids = CODEC.encode(text)
    for end in range(len(ids) + 1):
        pieces, made = stream(ids[:end])
        assert "".join(pieces) == CODEC.decode(ids[:end]) == made.text
        assert not any("\ufffd" in piece for piece in pieces[:-1])


@given(st.lists(st.integers(0, 255), max_size=30))
@settings(deadline=None, max_examples=200)
def test_any_bytes_at_all_stream_to_the_one_shot_text(ids: list[int]) -> None:
    pieces, _ = stream(ids)
    assert "".join(pieces) == CODEC.decode(ids)


def test_ascii_is_not_delayed_behind_an_unfinished_character() -> None:
    ids = CODEC.encode("ab🦊")
    made = TextStream(CODEC)
    shown = []
    for token in ids:
        made.push(token)
        shown.append(made.take())
    assert shown[:2] == ["a", "b"]
    assert "".join(shown) == "ab🦊"


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("hello the world", ("the",), "hello "),
        ("hello the world", ("world", "o t"), "hell"),
        ("hello", ("hello!",), "hello"),
        ("xxSTOPyy", ("STOPPED", "STOP"), "xx"),
        ("aXbXc", ("X",), "a"),
        ("你好，世界", ("，世",), "你好"),
        ("🦊🦊b", ("🦊b",), "🦊"),
        ("the", ("t",), ""),
    ],
)
def test_stop_strings_cut_the_text_and_no_part_of_them_is_streamed(
    text: str, stop: tuple[str, ...], expected: str
) -> None:
    pieces, made = stream(CODEC.encode(text), stop)
    assert made.text == expected == "".join(pieces)
    assert made.stopped == any(s in text for s in stop)


def test_random_texts_with_random_stops_cut_at_the_first_token_that_completes_one() -> None:
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choices("abé🦊", k=12))
        stops = tuple("".join(rng.choices("abé🦊", k=rng.randint(1, 3))) for _ in range(2))
        pieces, made = stream(CODEC.encode(text), stops)
        found = [i for i in range(len(text)) if any(text.startswith(s, i) for s in stops)]
        assert made.stopped == bool(found)
        assert "".join(pieces) == made.text
        if found:
            assert text.startswith(made.text)
            assert not any(s in made.text for s in stops)
        else:
            assert made.text == text


def test_prompts_of_every_kind() -> None:
    turn = CODEC.prompt_ids("hi")
    assert CODEC.decode(turn) == "user:hi\nassistant:"
    assert CODEC.prompt_ids([{"role": "user", "content": "hi"}]) == turn
    assert CODEC.decode(CODEC.prompt_ids("hi", system="be kind")) == "system:be kind\nuser:hi\nassistant:"
    assert CODEC.prompt_ids("hi", raw=True) == CODEC.encode("hi")
    assert CODEC.prompt_ids([1, 2]) == [1, 2]


@pytest.mark.parametrize("messages", [[], [{"role": "user"}], [{"content": "x"}], [{"role": 3, "content": "x"}]])
def test_malformed_conversations_are_refused(messages: list[dict[str, object]]) -> None:
    with pytest.raises(InvalidRequest):
        CODEC.chat(messages)


def test_a_model_without_template_or_with_a_refusing_one_says_so() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        TextCodec(byte_tokenizer()).prompt_ids("hi")
    refusing = TextCodec(byte_tokenizer(), "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        refusing.prompt_ids("hi")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ strftime_now('%Y')[:2] }}", "20"),
        ("{% for m in messages %}{%- generation -%} {{ m.content }} {%- endgeneration -%}{% endfor %}", "hi"),
        ("{{ {'a': 'é'} | tojson(ensure_ascii=False) }}{{ {'a': 'é'} | tojson }}", '{"a": "é"}{"a": "é"}'),
        ("{{ {'a': 1} | tojson(indent=1) }}", '{\n "a": 1\n}'),
    ],
)
def test_templates_may_use_what_transformers_gives_them(template: str, text: str) -> None:
    assert TextCodec(byte_tokenizer(), template).render([{"role": "user", "content": "hi"}]) == text


def test_an_empty_raw_prompt_becomes_the_beginning_of_text_or_is_refused() -> None:
    begins = TextCodec(byte_tokenizer(), special={"bos_token": "<s>"})
    assert begins.prompt_ids("", raw=True) == [begins.tokenizer.token_to_id("<s>")]
    with pytest.raises(InvalidRequest, match="empty"):
        CODEC.prompt_ids("", raw=True)
