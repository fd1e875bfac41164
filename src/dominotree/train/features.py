"""The feature cache: what the target thinks at every position of the corpus, computed once and memory-mapped.

A cache folder holds, row by row for its sequences in their order: `features.bin` (bf16, hidden states after
the tapped layers), `soft_ids.bin` and `soft_probs.bin` (the target's `top_k` likeliest next tokens as draft
ids, int32, and their probabilities, fp16, normalised over the draft vocabulary). `cache.json` has what it was made
with and the order. `progress.json` counts the sequences that are complete, so a cache can be read while it grows, and
goes on where it was stopped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dominotree.files import write_whole
from dominotree.train.data import Corpus, CorpusError, Sample, difference, read_json, split_order
from dominotree.train.target import TargetReader

__all__ = ["TOP_K", "CachedSample", "FeatureCache", "cached_draft_tokens", "fill_cache"]

TOP_K = 32
"""Likeliest tokens kept at each position."""


@dataclass(frozen=True)
class CachedSample:
    """One sequence with all that training needs of it, on the CPU.

    `tokens` int64 `[length]`; `features` bf16 `[length, layers * hidden]`; row p of `soft_ids` (int64) and
    `soft_probs` (float32), both `[length, top_k]`, is the target's distribution for the token at p + 1.
    """

    sample: Sample
    tokens: Tensor
    features: Tensor
    soft_ids: Tensor
    soft_probs: Tensor


def cached_draft_tokens(folder: str | Path) -> Tensor | None:
    """The draft vocabulary of the cache in `folder`, int64 `[draft_vocab]`; None where it says none."""
    tokens = read_json(Path(folder) / "cache.json").get("draft_tokens")
    return torch.tensor(tokens) if isinstance(tokens, list) else None


class FeatureCache:
    """The cache in `folder` for `corpus`, created or grown as needed: a corpus may have grown since.

    `target` is the fingerprint of the target's weights. Raises `CorpusError` when the folder was made with other
    settings or from another corpus.
    """

    def __init__(
        self,
        folder: str | Path,
        corpus: Corpus,
        *,
        target: str,
        layer_ids: tuple[int, ...],
        hidden_size: int,
        draft_tokens: Tensor,
        top_k: int = TOP_K,
        held_out: int = 60,
    ) -> None:
        self.folder, self.corpus, self.draft_tokens = Path(folder), corpus, draft_tokens
        self.layer_ids, self.width, self.top_k = layer_ids, len(layer_ids) * hidden_size, top_k
        if held_out and len(corpus.samples) < 2:
            raise CorpusError(
                "The corpus has 1 usable sequence, expected at least 2: one to train on and one held out; "
                "collect more, or hold out 0."
            )
        settings = {
            "target": target,
            "layer_ids": list(layer_ids),
            "hidden_size": hidden_size,
            "top_k": top_k,
            "draft_tokens": draft_tokens.tolist(),
            "held_out": held_out,
        }
        file = self.folder / "cache.json"
        stored = read_json(file)
        different = difference(stored, settings) if stored else None
        if different:
            raise self._misfit(f"was made with {different}")
        samples = corpus.samples
        self.held_out: int = stored.get("held_out_places", min(held_out, len(samples) // 2))
        self.order = self._grown(stored["order"], stored["corpus"]) if stored else split_order(samples, self.held_out)
        self.folder.mkdir(parents=True, exist_ok=True)
        grown = {"held_out_places": self.held_out, "corpus": corpus.digest(len(self.order)), "order": self.order}
        write_whole(file, json.dumps(settings | grown))
        lengths = [samples[i].length for i in self.order]
        self._rows = np.concatenate([[0], np.cumsum(lengths)])
        self._features = self._open("features.bin", "<u2", self.width)
        self._soft_ids = self._open("soft_ids.bin", "<i4", top_k)
        self._soft_probs = self._open("soft_probs.bin", "<f2", top_k)

    def _misfit(self, why: str) -> CorpusError:
        return CorpusError(f"The feature cache {self.folder} {why}: name another folder, or delete this one.")

    def _grown(self, order: list[int], digest: int) -> list[int]:
        """Sequences collected since come last, so that what is cached keeps its place; no seed changes what is held
        out, so that runs of different seeds compare.
        """
        known, count = len(order), len(self.corpus.samples)
        if known > count or self.corpus.digest(known) != digest:
            raise self._misfit(f"is of a corpus whose first {known} sequences are not the first of this one")
        generator = torch.Generator().manual_seed(known)
        return order + (torch.randperm(count - known, generator=generator) + known).tolist()

    def _open(self, name: str, dtype: str, width: int) -> npt.NDArray[Any]:
        file, rows = self.folder / name, int(self._rows[-1])
        row_bytes = width * np.dtype(dtype).itemsize
        with file.open("ab") as handle:  # a hole at the end: disk space is taken as rows are written
            if handle.tell() < self._rows[self.ready] * row_bytes:
                raise self._misfit(f"lacks rows of {name} that progress.json counts")
            if handle.tell() < rows * row_bytes:
                handle.truncate(rows * row_bytes)
        return np.memmap(file, dtype=dtype, mode="r+", shape=(rows, width))

    @property
    def held_out_starts(self) -> list[int]:
        """Where the sequences that are held out begin in the corpus."""
        return [self.sample(place).start for place in range(self.held_out)]

    @property
    def ready(self) -> int:
        """Sequences, in order, that are complete; reads the disk, so another process may be filling."""
        count = read_json(self.folder / "progress.json").get("sequences", 0)
        if type(count) is not int or not 0 <= count <= len(self.order):
            raise self._misfit("has a damaged progress.json")
        return count

    def sample(self, place: int) -> Sample:
        """The sequence at `place` in the order."""
        return self.corpus.samples[self.order[place]]

    def load(self, place: int) -> CachedSample:
        """The sequence at `place` in the order, which must be ready."""
        rows = slice(int(self._rows[place]), int(self._rows[place + 1]))
        sample = self.sample(place)
        return CachedSample(
            sample,
            self.corpus.read(sample),
            torch.from_numpy(self._features[rows].view(np.int16)).view(torch.bfloat16),
            torch.from_numpy(self._soft_ids[rows].astype(np.int64)),
            torch.from_numpy(self._soft_probs[rows].astype(np.float32)),
        )

    def store(self, place: int, features: Tensor, soft_ids: Tensor, soft_probs: Tensor) -> None:
        """Write the sequence at `place`; it counts as ready only after `mark_ready`."""
        rows = slice(int(self._rows[place]), int(self._rows[place + 1]))
        self._features[rows] = features.to(torch.bfloat16).cpu().view(torch.int16).numpy().view(np.uint16)
        self._soft_ids[rows] = soft_ids.cpu().numpy()
        self._soft_probs[rows] = soft_probs.cpu().numpy()

    def mark_ready(self, sequences: int) -> None:
        """Declare the first `sequences` of the order complete, on the disk first."""
        for array in (self._features, self._soft_ids, self._soft_probs):
            array.flush()  # type: ignore[attr-defined]
        write_whole(self.folder / "progress.json", json.dumps({"sequences": sequences}))


def fill_cache(
    cache: FeatureCache,
    target: TargetReader,
    *,
    until: int | None = None,
    seconds_between_marks: float = 20.0,
    report: Callable[[int, int, float], None] = lambda done, total, rate: None,
) -> None:
    """Compute what `cache` still lacks, up to `until` sequences.

    `report(done, total, tokens_per_second)` is called at every mark. Interrupted at any time, it goes on from
    the last mark.
    """
    total = len(cache.order) if until is None else min(until, len(cache.order))
    head = target.head[cache.draft_tokens.to(target.head.device)]
    begun = marked = time.monotonic()
    tokens_done, first = 0, cache.ready
    for place in range(first, total):
        tokens = cache.corpus.read(cache.sample(place))
        features, last = target.read(tokens, cache.layer_ids)
        with torch.inference_mode():
            probs, ids = torch.softmax((last @ head.T).float(), dim=-1).topk(cache.top_k)
        cache.store(place, features, ids.int(), probs.half())
        tokens_done += len(tokens)
        now = time.monotonic()
        if now - marked > seconds_between_marks or place + 1 == total:
            cache.mark_ready(place + 1)
            marked = now
            report(place + 1, total, tokens_done / (now - begun))
