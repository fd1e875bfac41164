"""Corpus folders: what is skipped is counted, what is broken is named with file and line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dominotree.errors import InvalidRequest
from dominotree.train.data import CorpusError, choose_draft_tokens, read_corpus, split_order
from train.tiny_run import write_corpus

GOOD = [([5, 6, 7], [8, 9, 10, 1]), ([5, 6], [11, 12, 1])]


def test_sequences_come_back_as_written(tmp_path: Path) -> None:
    corpus = read_corpus(write_corpus(tmp_path, GOOD))
    assert [corpus.read(sample).tolist() for sample in corpus.samples] == [[*p, *a] for p, a in GOOD]
    assert [(s.prompt_length, s.answer_length) for s in corpus.samples] == [(3, 4), (2, 3)]
    assert not corpus.skipped


def test_unusable_sequences_are_skipped_with_a_count_and_the_others_keep_their_tokens(tmp_path: Path) -> None:
    broken = [([5, 6], []), GOOD[0], ([5], [9]), ([], [4, 5, 6]), ([7], []), GOOD[1]]
    corpus = read_corpus(write_corpus(tmp_path, broken))
    assert dict(corpus.skipped) == {"empty answer": 2, "answer too short": 1, "no prompt": 1}
    assert [corpus.read(sample).tolist() for sample in corpus.samples] == [[*p, *a] for p, a in GOOD]


@pytest.mark.parametrize(
    "line",
    [
        "[3, 4",
        '[3, 4, "kind"]',
        "{}",
        '[3, -4, "kind", 0]',
        '[3, "4", "kind", 0]',
        "[3, 4, 0, 0]",
        "nonsense",
        '[3.5, 4, "k", 0]',
        '[true, 4, "k", 0]',
    ],
)
def test_a_bad_line_is_refused_with_file_and_line(tmp_path: Path, line: str) -> None:
    write_corpus(tmp_path, GOOD)
    index = tmp_path / "index.jsonl"
    index.write_text(index.read_text().splitlines()[0] + "\n" + line + "\n")
    with pytest.raises(CorpusError, match=r"index\.jsonl line 2") as refusal:
        read_corpus(tmp_path)
    assert "\n" not in str(refusal.value)


def test_a_line_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    write_corpus(tmp_path, GOOD)
    index = tmp_path / "index.jsonl"
    index.write_bytes(index.read_bytes().replace(b"kind1", b"kind\xff"))
    with pytest.raises(CorpusError, match=r"index\.jsonl line 2 is no JSON"):
        read_corpus(tmp_path)


@pytest.mark.parametrize("name", ["tokens.bin", "index.jsonl"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    write_corpus(tmp_path, GOOD)
    (tmp_path / name).unlink()
    with pytest.raises(CorpusError, match=name):
        read_corpus(tmp_path)


def test_tokens_and_index_must_agree(tmp_path: Path) -> None:
    write_corpus(tmp_path, GOOD)
    np.arange(5, dtype="<u2").tofile(tmp_path / "tokens.bin")
    with pytest.raises(CorpusError, match="holds 5 tokens"):
        read_corpus(tmp_path)
    (tmp_path / "tokens.bin").write_bytes(b"123")
    with pytest.raises(CorpusError, match="cut off"):
        read_corpus(tmp_path)


def test_a_corpus_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path, GOOD)
    with pytest.raises(CorpusError, match="token 12, the target has 12"):
        read_corpus(tmp_path, vocab_size=12)


@pytest.mark.parametrize("sequences", [[], [([5], [])]])
def test_a_corpus_with_nothing_usable_is_refused(tmp_path: Path, sequences: list[tuple[list[int], list[int]]]) -> None:
    write_corpus(tmp_path, sequences)
    with pytest.raises(CorpusError, match=r"no usable|empty"):
        read_corpus(tmp_path)


def test_large_vocabularies_use_wider_tokens(tmp_path: Path) -> None:
    write_corpus(tmp_path, GOOD)
    np.array([token + 100_000 for p, a in GOOD for token in [*p, *a]], dtype="<u4").tofile(tmp_path / "tokens.bin")
    (tmp_path / "corpus.json").write_text(json.dumps({"dtype": "uint32"}))
    corpus = read_corpus(tmp_path)
    assert corpus.read(corpus.samples[1]).tolist() == [100_005, 100_006, 100_011, 100_012, 100_001]
    (tmp_path / "corpus.json").write_text(json.dumps({"dtype": "float"}))
    with pytest.raises(CorpusError, match=r"corpus\.json"):
        read_corpus(tmp_path)


def test_held_out_sequences_are_of_every_source_and_greedy_first(tmp_path: Path) -> None:
    write_corpus(tmp_path, GOOD * 15)
    lines = [[3, 4, f"kind{i % 3}", float(i % 2)] if i % 2 == 0 else [2, 3, f"kind{i % 3}", 1.0] for i in range(30)]
    (tmp_path / "index.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    samples = read_corpus(tmp_path).samples
    order = split_order(samples, 6)
    assert sorted(order) == list(range(30))
    chosen = [samples[i] for i in order[:6]]
    assert sorted(s.source for s in chosen) == ["kind0", "kind0", "kind1", "kind1", "kind2", "kind2"]
    assert all(s.temperature == 0 for s in chosen)
    assert split_order(samples, 6) == order


def test_the_draft_vocabulary_holds_the_commonest_answer_tokens_and_every_stop_token(tmp_path: Path) -> None:
    corpus = read_corpus(write_corpus(tmp_path, [([5, 5, 5, 5], [8, 8, 8, 9, 9, 7])]))
    assert choose_draft_tokens(corpus, 4, always=[1, 90], vocab_size=96).tolist() == [1, 8, 9, 90]
    assert torch.equal(choose_draft_tokens(corpus, 96, always=[1], vocab_size=96), torch.arange(96))


def test_a_draft_vocabulary_without_room_for_the_special_tokens_is_refused(tmp_path: Path) -> None:
    corpus = read_corpus(write_corpus(tmp_path, GOOD))
    with pytest.raises(InvalidRequest, match="draft_vocab_size is 2, expected at least 3"):
        choose_draft_tokens(corpus, 2, always=[1, 90, 91], vocab_size=96)
