"""The corpus: a target's own answers to prompts, as token ids.

A corpus folder holds `tokens.bin` (token ids, all sequences one after another, little-endian uint16, or
uint32 where `corpus.json` says so) and `index.jsonl` (one line a sequence: `[prompt_tokens, answer_tokens,
source, temperature]`).
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dominotree.batch import read_lines
from dominotree.errors import DominoTreeError, InvalidRequest

__all__ = [
    "TOKEN_TYPES",
    "Corpus",
    "CorpusError",
    "Sample",
    "choose_draft_tokens",
    "difference",
    "read_corpus",
    "read_json",
    "read_json_lines",
    "split_order",
]

TOKEN_TYPES = {"uint16": "<u2", "uint32": "<u4"}
"""What `corpus.json` may call the tokens' dtype."""


class CorpusError(DominoTreeError):
    """A corpus that cannot be trained on; the message names the file and the line."""


def read_json(file: Path) -> dict[str, Any]:
    """The object in `file`, empty where there is no file. Raises `CorpusError` naming a file that is damaged."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CorpusError(f"{file} is damaged ({error}), expected JSON: restore it, or begin anew.") from error
    if not isinstance(values, dict):
        raise CorpusError(f"{file} holds a {type(values).__name__}, expected an object: restore it, or begin anew.")
    return values


def read_json_lines(file: Path) -> Iterator[tuple[str, Any]]:
    """Of each line that is not blank: where it stands, and its value.

    Raises `CorpusError`, with file and line, for one that is no JSON in UTF-8, `InvalidRequest` for a file that cannot
    be read.
    """
    for line in read_lines(file):
        where = f"{file} line {line.number}"
        try:
            value = json.loads(line.text.decode())
        except (ValueError, RecursionError) as error:
            raise CorpusError(f"{where} is no JSON ({error}): correct or remove the line.") from error
        yield where, value


def difference(stored: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """What `stored` has otherwise than `now`, the first of it, in words."""
    for name, value in now.items():
        if stored.get(name) != value:
            return f"{name} {stored.get(name)!s:.60}, now {value!s:.60}"
    return None


@dataclass(frozen=True)
class Sample:
    """One sequence of the corpus: `prompt_length + answer_length` tokens from `start` on in tokens.bin."""

    start: int
    prompt_length: int
    answer_length: int
    source: str
    temperature: float

    @property
    def length(self) -> int:
        """Tokens of prompt and answer."""
        return self.prompt_length + self.answer_length


@dataclass(frozen=True)
class Corpus:
    """Usable sequences of a corpus folder, in file order; `skipped` counts those left out, by reason."""

    tokens: npt.NDArray[Any]
    samples: Sequence[Sample]
    skipped: Counter[str]

    def read(self, sample: Sample) -> Tensor:
        """Token ids of prompt and answer, int64 `[sample.length]`, on the CPU."""
        piece = self.tokens[sample.start : sample.start + sample.length]
        return torch.from_numpy(piece.astype(np.int64))

    def digest(self, count: int) -> int:
        """Tells the first `count` sequences from any others, by their lengths and tokens."""
        first = self.samples[:count]
        lengths = np.array([(sample.start, sample.prompt_length, sample.length) for sample in first], dtype="<i8")
        end = first[-1].start + first[-1].length if first else 0
        return zlib.crc32(self.tokens[:end].data, zlib.crc32(lengths.data))


def read_corpus(folder: str | Path, *, vocab_size: int | None = None, min_answer: int = 2) -> Corpus:
    """The corpus in `folder`, tokens memory-mapped.

    Sequences without a prompt, or with fewer than `min_answer` answer tokens, are skipped and counted. Raises
    `CorpusError`, with file and line, for a line that is not four values of the right kind, for fewer or more
    tokens than the index speaks of, for token ids beyond `vocab_size`, and when nothing is left.
    """
    folder = Path(folder)
    tokens_file, index_file = folder / "tokens.bin", folder / "index.jsonl"
    for file in (tokens_file, index_file):
        if not file.is_file():
            raise CorpusError(f"No {file.name} in {folder}: expected a folder made by `dominotree train collect`.")
    dtype = _token_dtype(folder)
    if tokens_file.stat().st_size % dtype.itemsize:
        raise CorpusError(f"{tokens_file} is cut off inside a token: collect the corpus again.")
    samples, skipped, start = [], Counter[str](), 0
    for where, values in read_json_lines(index_file):
        sample = _sample(values, start, where)
        start += sample.length
        reason = _unusable(sample, min_answer)
        if reason:
            skipped[reason] += 1
        else:
            samples.append(sample)
    held = tokens_file.stat().st_size // dtype.itemsize
    if held != start:
        raise CorpusError(f"{tokens_file} holds {held} tokens, {index_file.name} speaks of {start}: collect again.")
    if not samples:
        raise CorpusError(f"{index_file} has no usable sequence ({_told(skipped)}): collect more answers.")
    tokens = np.memmap(tokens_file, dtype=dtype, mode="r")
    if vocab_size is not None and int(tokens.max()) >= vocab_size:
        raise CorpusError(
            f"{tokens_file} holds token {int(tokens.max())}, the target has {vocab_size} tokens: "
            "use a corpus of this target."
        )
    return Corpus(tokens, samples, skipped)


def _token_dtype(folder: Path) -> np.dtype[Any]:
    name = str(read_json(folder / "corpus.json").get("dtype", "uint16"))
    if name not in TOKEN_TYPES:
        raise CorpusError(f"{folder / 'corpus.json'} has dtype {name}, expected uint16 or uint32: collect again.")
    return np.dtype(TOKEN_TYPES[name])


def _sample(values: Any, start: int, where: str) -> Sample:
    kinds: tuple[tuple[type, ...], ...] = ((int,), (int,), (str,), (int, float))
    if not isinstance(values, list) or len(values) != 4:
        raise CorpusError(f"{where}: expected [prompt_tokens, answer_tokens, source, temperature]: {values!r:.80}")
    right = all(type(value) in kind for value, kind in zip(values, kinds, strict=True))
    if not right or min(values[:2]) < 0:
        raise CorpusError(f"{where}: expected two counts, a name and a temperature: {values!r:.80}")
    return Sample(start, values[0], values[1], values[2], float(values[3]))


def _unusable(sample: Sample, min_answer: int) -> str | None:
    if sample.answer_length == 0:
        return "empty answer"
    if sample.prompt_length == 0:
        return "no prompt"
    return "answer too short" if sample.answer_length < min_answer else None


def _told(skipped: Counter[str]) -> str:
    return ", ".join(f"{count} x {reason}" for reason, count in skipped.items()) or "it is empty"


def split_order(samples: Sequence[Sample], held_out: int) -> list[int]:
    """Every sample's number once, shuffled; the first `held_out` are for evaluation.

    Those are taken in turn from every source, greedy answers first: along these, teacher forcing meets the
    very tokens that decoding at temperature 0 would.
    """
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.randperm(len(samples), generator=generator).tolist()
    queues: dict[str, list[int]] = {}
    for i in sorted(shuffled, key=lambda i: samples[i].temperature > 0):  # stable: the shuffle stays within
        queues.setdefault(samples[i].source, []).append(i)
    chosen: list[int] = []
    while len(chosen) < min(held_out, len(samples)):
        for source in sorted(queues):
            if queues[source] and len(chosen) < held_out:
                chosen.append(queues[source].pop(0))
    taken = set(chosen)
    return chosen + [i for i in shuffled if i not in taken]


def choose_draft_tokens(corpus: Corpus, size: int, always: Collection[int], vocab_size: int) -> Tensor:
    """The draft vocabulary: `always` (stop and special tokens) and the commonest tokens of the answers.

    int64 `[size]`, increasing; ties fall to the smaller id. Raises `InvalidRequest` where `always` are more. Idea and
    tensor names: EAGLE-3 (arXiv 2503.01840).
    """
    if len(set(always)) > size:
        raise InvalidRequest(
            f"Drafter setting draft_vocab_size is {size}, expected at least {len(set(always))}, the target's stop and "
            "special tokens, or 0 for all tokens."
        )
    counts = np.zeros(vocab_size, dtype=np.int64)
    for sample in corpus.samples:
        answer = corpus.tokens[sample.start + sample.prompt_length : sample.start + sample.length]
        counts += np.bincount(answer, minlength=vocab_size)
    counts[list(always)] = counts.max() + 1
    commonest = np.lexsort((np.arange(vocab_size), -counts))[:size]
    return torch.from_numpy(np.sort(commonest))
