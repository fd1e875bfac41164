"""The feature cache: the layers' own outputs, filled once, gone on with after a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dominotree.train.data import CorpusError, read_corpus
from dominotree.train.features import FeatureCache, cached_draft_tokens, fill_cache
from dominotree.train.target import TargetReader, load_target_reader
from train.tiny_run import write_corpus

IDS = torch.arange(0, 96, 2)
SEQUENCES = [([i + 4, i + 5], [i + 6, i + 7, i + 8]) for i in range(12)]


@pytest.fixture(scope="module")
def reader(target: Path) -> TargetReader:
    return load_target_reader(target)


def cache(folder: Path, corpus: Path, **changes: Any) -> FeatureCache:
    settings: dict[str, Any] = {
        "target": "one",
        "layer_ids": (0, 2),
        "hidden_size": 32,
        "draft_tokens": IDS,
        "top_k": 5,
        "held_out": 4,
    }
    return FeatureCache(folder, read_corpus(corpus), **{**settings, **changes})


def test_features_are_the_layers_own_outputs_also_of_the_last_layer(reader: TargetReader) -> None:
    tokens = torch.tensor([5, 6, 7, 8])
    features, last = reader.read(tokens, (0, 3))
    outputs = reader._model(tokens[None], output_hidden_states=True)
    assert torch.equal(features[:, :32], outputs.hidden_states[1][0])
    normed = outputs.hidden_states[-1][0]  # transformers gives the last one after the final norm
    assert not torch.equal(features[:, 32:], normed)
    assert torch.equal(reader._model.model.norm(features[:, 32:]), normed)
    assert torch.equal(last, normed)


def test_the_cache_gives_back_features_and_the_targets_likeliest_draft_tokens(
    tmp_path: Path, corpus: Path, reader: TargetReader
) -> None:
    filled = cache(tmp_path, corpus)
    fill_cache(filled, reader)
    assert filled.ready == len(filled.order)
    for place in (0, filled.ready - 1):
        sample = filled.load(place)
        features, last = reader.read(sample.tokens, (0, 2))
        assert torch.equal(sample.features, features.bfloat16())
        probs = torch.softmax((last @ reader.head[IDS].T).float(), -1)
        torch.testing.assert_close(probs.gather(1, sample.soft_ids), sample.soft_probs, atol=1e-3, rtol=1e-3)
        assert torch.equal(probs.gather(1, sample.soft_ids[:, :1])[:, 0], probs.amax(-1))


def test_a_stopped_cache_goes_on_where_it_was(tmp_path: Path, corpus: Path, reader: TargetReader) -> None:
    fill_cache(cache(tmp_path / "a", corpus), reader, until=7)
    again = cache(tmp_path / "a", corpus)
    assert again.ready == 7
    calls: list[int] = []
    fill_cache(again, reader, seconds_between_marks=0, report=lambda done, total, rate: calls.append(done))
    assert calls[0] == 8
    whole = cache(tmp_path / "b", corpus)
    fill_cache(whole, reader)
    assert whole.order == again.order
    assert all(torch.equal(whole.load(place).features, again.load(place).features) for place in range(whole.ready))


def test_sequences_collected_later_come_last(tmp_path: Path, reader: TargetReader) -> None:
    first = cache(tmp_path / "f", write_corpus(tmp_path / "c", SEQUENCES[:8]), held_out=2)
    fill_cache(first, reader)
    grown = cache(tmp_path / "f", write_corpus(tmp_path / "c", SEQUENCES), held_out=2)
    assert (grown.ready, grown.order[:8]) == (8, first.order)
    assert sorted(grown.order[8:]) == [8, 9, 10, 11]
    fill_cache(grown, reader)
    assert torch.equal(grown.load(11).features, reader.read(grown.load(11).tokens, (0, 2))[0].bfloat16())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"target": "another"}, "target one, now another"),
        ({"layer_ids": (0, 1)}, "layer_ids"),
        ({"draft_tokens": IDS + 1}, "draft_tokens"),
        ({"held_out": 5}, "held_out"),
    ],
)
def test_a_cache_made_with_other_settings_is_refused(
    tmp_path: Path, corpus: Path, changes: dict[str, Any], named: str
) -> None:
    cache(tmp_path, corpus)
    with pytest.raises(CorpusError, match=named):
        cache(tmp_path, corpus, **changes)


@pytest.mark.parametrize(
    "others",
    [
        [([5, 6], [7, 8])] * 30,
        SEQUENCES[:7],
        [*SEQUENCES[:7], ([11, 12], [13, 14, 16]), *SEQUENCES[8:]],
        [*SEQUENCES[:6], ([10, 11, 12], [13, 14]), *SEQUENCES[7:]],
    ],
)
def test_a_cache_of_another_corpus_is_refused(tmp_path: Path, others: list[tuple[list[int], list[int]]]) -> None:
    cache(tmp_path / "f", write_corpus(tmp_path / "c", SEQUENCES[:8]))
    with pytest.raises(CorpusError, match="whose first 8 sequences are not the first of this one"):
        cache(tmp_path / "f", write_corpus(tmp_path / "c", others))


def test_a_cache_that_does_not_say_its_target_is_refused(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "cache.json").write_text('{"layer_ids": [0, 2], "hidden_size": 32, "draft_tokens": 1234}')
    assert cached_draft_tokens(tmp_path) is None
    with pytest.raises(CorpusError, match="was made with target None, now one"):
        cache(tmp_path, corpus)


def test_what_is_held_out_stays_when_the_corpus_grows(tmp_path: Path) -> None:
    first = cache(tmp_path / "f", write_corpus(tmp_path / "c", SEQUENCES[:4]))
    grown = cache(tmp_path / "f", write_corpus(tmp_path / "c", SEQUENCES))
    assert first.held_out == grown.held_out == 2
    assert first.held_out_starts == grown.held_out_starts
    assert cache(tmp_path / "g", tmp_path / "c").held_out == 4


@pytest.mark.parametrize("name", ["cache.json", "progress.json"])
def test_a_damaged_file_is_named(tmp_path: Path, corpus: Path, reader: TargetReader, name: str) -> None:
    fill_cache(cache(tmp_path, corpus), reader, until=2)
    (tmp_path / name).write_text('{"')
    with pytest.raises(CorpusError, match=name):
        cache(tmp_path, corpus)


def test_a_file_that_lost_its_end_is_not_filled_with_zeros(tmp_path: Path, corpus: Path, reader: TargetReader) -> None:
    fill_cache(cache(tmp_path, corpus), reader, until=2)
    with (tmp_path / "features.bin").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(CorpusError, match=r"lacks rows of features\.bin"):
        cache(tmp_path, corpus)


def test_one_sequence_alone_cannot_be_held_out(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "c", [([5, 6], [7, 8])])
    with pytest.raises(CorpusError, match="1 usable sequence"):
        cache(tmp_path / "f", folder)
    assert cache(tmp_path / "g", folder, held_out=0).held_out == 0
