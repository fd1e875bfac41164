"""Collecting: the target's own answers, the same however often it was stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import dominotree as dt
from dominotree.drafters.checkpoint import read_checkpoint
from dominotree.errors import DominoTreeError
from dominotree.targets.load import load_target
from dominotree.train.collect import Conversation, collect, read_prompts
from dominotree.train.data import CorpusError, read_corpus
from drafters.synthetic import write_tiny_drafter


class TokenPair(dt.Pair):
    """A pair whose messages are token ids written out, since the tiny target has no tokenizer."""

    def prompt_ids(self, prompt: object, **form: object) -> list[int]:
        assert isinstance(prompt, list)
        if isinstance(prompt[0], int):
            return prompt
        return [int(word) for message in prompt for word in message["content"].split()] or [5]


@pytest.fixture(scope="module")
def pair(target: Path) -> TokenPair:
    return TokenPair(load_target(target, dtype=torch.float32, device=torch.device("cpu")), None, name="tiny")


PROMPTS = [Conversation((f"{i + 4} {i + 9} {i + 2}",), f"kind{i % 2}") for i in range(7)]


def files(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in ("tokens.bin", "index.jsonl")]


def test_answers_are_the_targets_own_and_make_a_corpus(tmp_path: Path, pair: TokenPair) -> None:
    assert collect(pair, PROMPTS, tmp_path, max_new_tokens=9, batch=3) == (7, 0)
    corpus = read_corpus(tmp_path, vocab_size=96, min_answer=1)
    assert [s.temperature for s in corpus.samples] == [0.0, 0.7, 0.0, 1.0, 0.0, 0.7, 0.0]
    assert [s.source for s in corpus.samples] == [p.source for p in PROMPTS]
    for sample, asked in zip(corpus.samples[::2], PROMPTS[::2], strict=True):
        prompt = [int(word) for word in asked.turns[0].split()]
        alone = pair.generate(prompt, method="ar", max_new_tokens=9)
        assert corpus.read(sample).tolist() == prompt + alone.token_ids


def test_a_stopped_collection_goes_on_to_the_same_corpus(tmp_path: Path, pair: TokenPair) -> None:
    collect(pair, PROMPTS, tmp_path / "whole", max_new_tokens=9, batch=2)

    def stop(done: int, total: int, rate: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(pair, PROMPTS, tmp_path / "cut", max_new_tokens=9, batch=2, report=stop)
    with (tmp_path / "cut/tokens.bin").open("ab") as half_written:
        half_written.write(b"12345")
    assert collect(pair, PROMPTS, tmp_path / "cut", max_new_tokens=9, batch=2) == (7, 0)
    assert files(tmp_path / "cut") == files(tmp_path / "whole")
    assert collect(pair, PROMPTS, tmp_path / "cut", max_new_tokens=9, batch=2) == (7, 0)
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_a_collection_that_stopped_before_its_first_answers_begins_anew(
    tmp_path: Path, pair: TokenPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("dominotree.train.collect._answer", stop)
        collect(pair, PROMPTS, tmp_path, max_new_tokens=10)
    (tmp_path / "tokens.bin").write_bytes(b"xx")  # killed before what it wrote was counted
    assert collect(pair, PROMPTS, tmp_path, max_new_tokens=9, batch=3) == (7, 0)
    assert len(read_corpus(tmp_path).samples) > 0


def test_other_settings_do_not_mix_into_a_corpus(tmp_path: Path, pair: TokenPair) -> None:
    collect(pair, PROMPTS[:2], tmp_path, max_new_tokens=9)
    with pytest.raises(CorpusError, match="max_new_tokens"):
        collect(pair, PROMPTS, tmp_path, max_new_tokens=10)


def test_other_prompts_do_not_pass_for_those_answered(tmp_path: Path, pair: TokenPair) -> None:
    collect(pair, PROMPTS[:3], tmp_path, max_new_tokens=9)
    with pytest.raises(CorpusError, match="answers 3 prompts that are not the first of those given"):
        collect(pair, PROMPTS[3:], tmp_path, max_new_tokens=9)
    assert collect(pair, PROMPTS, tmp_path, max_new_tokens=9) == (7, 0)
    collect(pair, PROMPTS, tmp_path / "at once", max_new_tokens=9)
    assert files(tmp_path) == files(tmp_path / "at once")


def test_a_corpus_that_does_not_say_its_prompts_is_gone_on_with(tmp_path: Path, pair: TokenPair) -> None:
    collect(pair, PROMPTS[:3], tmp_path, max_new_tokens=9)
    counts = json.loads((tmp_path / "corpus.json").read_text())
    del counts["prompts"], counts["cut"]
    (tmp_path / "corpus.json").write_text(json.dumps(counts))
    assert collect(pair, PROMPTS, tmp_path, max_new_tokens=9) == (7, 0)


def test_a_conversation_ends_where_the_context_is_full(tmp_path: Path, pair: TokenPair) -> None:
    long = " ".join(["7"] * pair.context)
    asked = [
        Conversation((long,), "long"),
        Conversation(("4 9 2", long, "4"), "grows"),
        Conversation((long.removeprefix("7 "),), "fits"),
    ]
    assert collect(pair, asked, tmp_path, max_new_tokens=9, batch=1) == (3, 2)
    samples = read_corpus(tmp_path, min_answer=1).samples
    assert [(s.source, s.prompt_length) for s in samples] == [("grows", 3), ("fits", pair.context - 1)]
    assert collect(pair, [*asked, *PROMPTS[:1]], tmp_path, max_new_tokens=9) == (4, 2)


@pytest.mark.parametrize("projector", ["domino", None])
def test_answers_are_the_same_with_a_drafter_of_either_kind(
    tmp_path: Path, pair: TokenPair, projector: str | None
) -> None:
    config, tensors = read_checkpoint(write_tiny_drafter(tmp_path / "drafter", projector=projector))
    drafting = TokenPair(pair.target, None, dt.Drafter(config, tensors, pair.target), name="tiny")
    collect(drafting, PROMPTS, tmp_path / "drafted", max_new_tokens=9)
    collect(pair, PROMPTS, tmp_path / "plain", max_new_tokens=9)
    assert files(tmp_path / "drafted") == files(tmp_path / "plain")


@pytest.mark.parametrize("name", ["tokens.bin", "index.jsonl"])
def test_a_file_that_lost_its_end_is_not_filled_with_zeros(tmp_path: Path, pair: TokenPair, name: str) -> None:
    collect(pair, PROMPTS[:2], tmp_path, max_new_tokens=9)
    with (tmp_path / name).open("r+b") as file:
        file.truncate(4)
    with pytest.raises(CorpusError, match=rf"{name} has 4 bytes"):
        collect(pair, PROMPTS, tmp_path, max_new_tokens=9)


@pytest.mark.parametrize("content", ["{", "[]", "\udcff"])
def test_a_damaged_corpus_file_is_named(tmp_path: Path, pair: TokenPair, content: str) -> None:
    collect(pair, PROMPTS[:2], tmp_path, max_new_tokens=9)
    (tmp_path / "corpus.json").write_bytes(content.encode(errors="surrogateescape"))
    for read in (lambda: collect(pair, PROMPTS, tmp_path, max_new_tokens=9), lambda: read_corpus(tmp_path)):
        with pytest.raises(CorpusError, match=r"corpus\.json"):
            read()


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "{}",
        '{"turns": []}',
        '{"turns": [3]}',
        '{"prompt": ""}',
        '{"prompt": 5}',
        '"text"',
        '{"prompt": "\\ud800"}',
    ],
)
def test_a_bad_prompt_is_refused_with_file_and_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "fine"}\n\n' + line + "\n")
    with pytest.raises(CorpusError, match=r"p\.jsonl line 3") as refusal:
        read_prompts(tmp_path / "p.jsonl")
    assert "\n" not in str(refusal.value)


def test_prompts_come_with_their_source_or_the_files_name(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"turns": ["b", "c"], "source": "mt"}]
    (tmp_path / "mine.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    assert read_prompts(tmp_path / "mine.jsonl") == [
        Conversation(("a",), "mine"),
        Conversation(("b", "c"), "mt"),
    ]


def test_a_line_of_prompts_ends_at_a_line_feed_alone(tmp_path: Path) -> None:
    texts = ["one\u2028two", "three\x85four\x0c"]
    lines = [json.dumps({"prompt": text}, ensure_ascii=False).encode() for text in texts]
    (tmp_path / "p.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines))
    assert [found.turns for found in read_prompts(tmp_path / "p.jsonl")] == [(text,) for text in texts]


def test_a_line_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(CorpusError, match=r"p\.jsonl line 2 is no JSON"):
        read_prompts(tmp_path / "p.jsonl")


@pytest.mark.parametrize("content", [None, "", "\n\n"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(DominoTreeError, match=r"p\.jsonl"):
        read_prompts(tmp_path / "p.jsonl")


@pytest.mark.parametrize(
    ("value", "turns"),
    [
        ("What is 2 + 2?", ("What is 2 + 2?",)),
        (["One.", "Two."], ("One.", "Two.")),
        ([{"role": "system", "content": "s"}, {"role": "user", "content": "Hi."}], ("Hi.",)),
    ],
)
def test_prompts_come_from_a_data_set_too(tmp_path: Path, value: object, turns: tuple[str, ...]) -> None:
    folder = tmp_path / "sums"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps({"asked": value, "n": n}) + "\n" for n in range(3)))
    found = read_prompts(f"hub:{folder}:train:asked")
    assert [(one.turns, one.source) for one in found] == [(turns, "sums")] * 3


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("hub:name", "expected hub:NAME:SPLIT:COLUMN"),
        ("hub:{folder}:train:other", "no column 'other': expected one of asked"),
        ("hub:{folder}:test:asked", "cannot be read"),
        ("hub:{folder}:train:n", "row 0: expected a prompt"),
    ],
)
def test_a_data_set_that_does_not_hold_prompts_is_one_line(tmp_path: Path, spec: str, says: str) -> None:
    (tmp_path / "train.jsonl").write_text('{"asked": "Hi.", "n": 1}\n')
    with pytest.raises(CorpusError, match=says) as raised:
        read_prompts(spec.format(folder=tmp_path))
    assert "\n" not in str(raised.value)
