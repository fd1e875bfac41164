"""The feature cache: the layers' own outputs, filled once, gone on with after a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dominotree.train.data import CorpusError, read_corpus
from dominotree.train.features import FeatureCache, fill_cache
from dominotree.train.target import TargetReader, load_target_reader
from train.tiny_run import write_corpus

IDS = torch.arange(0, 96, 2)


@pytest.fixture(scope="module")
def reader(target: Path) -> TargetReader:
    return load_target_reader(target)


def cache(folder: Path, corpus: Path, **changes: Any) -> FeatureCache:
    settings: dict[str, Any] = {
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
    sequences = [([i + 4, i + 5], [i + 6, i + 7, i + 8]) for i in range(12)]
    first = cache(tmp_path / "f", write_corpus(tmp_path / "c", sequences[:8]), held_out=2)
    fill_cache(first, reader)
    grown = cache(tmp_path / "f", write_corpus(tmp_path / "c", sequences), held_out=2)
    assert (grown.ready, grown.order[:8]) == (8, first.order)
    assert sorted(grown.order[8:]) == [8, 9, 10, 11]
    fill_cache(grown, reader)
    assert torch.equal(grown.load(11).features, reader.read(grown.load(11).tokens, (0, 2))[0].bfloat16())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_ids": (0, 1)}, "layer_ids"),
        ({"draft_tokens": IDS + 1}, "draft_tokens"),
    ],
)
def test_a_cache_made_with_other_settings_is_refused(
    tmp_path: Path, corpus: Path, changes: dict[str, Any], named: str
) -> None:
    cache(tmp_path, corpus)
    with pytest.raises(CorpusError, match=named):
        cache(tmp_path, corpus, **changes)


def test_a_cache_of_another_corpus_is_refused(tmp_path: Path, corpus: Path) -> None:
    cache(tmp_path / "f", corpus)
    with pytest.raises(CorpusError, match="first_sample"):
        cache(tmp_path / "f", write_corpus(tmp_path / "c", [([5, 6], [7, 8])] * 30))


def test_one_sequence_alone_cannot_be_held_out(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "c", [([5, 6], [7, 8])])
    with pytest.raises(CorpusError, match="1 usable sequence"):
        cache(tmp_path / "f", folder)
    assert cache(tmp_path / "g", folder, held_out=0).held_out == 0
