"""Collecting: the target's own answers, the same however often it was stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import dominotree as dt
from dominotree.targets.load import load_target
from dominotree.train.collect import Conversation, collect, read_prompts
from dominotree.train.data import CorpusError, read_corpus


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
    assert collect(pair, PROMPTS, tmp_path, max_new_tokens=9, batch=3) == 7
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
    assert collect(pair, PROMPTS, tmp_path / "cut", max_new_tokens=9, batch=2) == 7
    assert files(tmp_path / "cut") == files(tmp_path / "whole")
    assert collect(pair, PROMPTS, tmp_path / "cut", max_new_tokens=9, batch=2) == 7
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_other_settings_do_not_mix_into_a_corpus(tmp_path: Path, pair: TokenPair) -> None:
    collect(pair, PROMPTS[:2], tmp_path, max_new_tokens=9)
    with pytest.raises(CorpusError, match="max_new_tokens"):
        collect(pair, PROMPTS, tmp_path, max_new_tokens=10)


@pytest.mark.parametrize(
    "line", ["{", "[]", "{}", '{"turns": []}', '{"turns": [3]}', '{"prompt": ""}', '{"prompt": 5}', '"text"']
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


@pytest.mark.parametrize("content", [None, "", "\n\n"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(CorpusError, match=r"p\.jsonl"):
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
