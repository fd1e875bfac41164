"""Collecting a corpus: the target's own answers to prompts."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from dominotree.files import write_whole
from dominotree.train.data import TOKEN_TYPES, CorpusError, difference, read_json, read_json_lines

if TYPE_CHECKING:
    from dominotree.pair import Pair

__all__ = ["Conversation", "collect", "read_prompts"]

TEMPERATURES = (0.0, 0.7, 0.0, 1.0)
"""Half of the answers greedy, as most users decode; the others show where else the target goes."""


@dataclass(frozen=True)
class Conversation:
    """User turns that the target answers one after another, and where they come from."""

    turns: tuple[str, ...]
    source: str


HUB = "hub:"


def read_prompts(file: str | Path) -> list[Conversation]:
    """Conversations of a JSONL file, one `{"prompt": ...}` or `{"turns": [...]}` a line, or of a hub data set.

    A data set is written `hub:NAME[:CONFIG]:SPLIT:COLUMN`; its column holds a prompt, a list of turns, or a list of
    messages of which the user's are taken. `source`, or else the file's or data set's name, is what the model card
    will call them. Raises `CorpusError` with file and line, or row, and `InvalidRequest` for a file that cannot be
    read.
    """
    if str(file).startswith(HUB):
        return _read_dataset(str(file))
    file = Path(file)
    found = [_parse(values, where, file.stem) for where, values in read_json_lines(file)]
    if not found:
        raise CorpusError(f"{file} has no prompts: expected one JSON object a line.")
    return found


def _read_dataset(spec: str) -> list[Conversation]:
    parts = spec.removeprefix(HUB).split(":")
    if not 3 <= len(parts) <= 4 or not all(parts):
        raise CorpusError(f"{spec} names no data set: expected hub:NAME:SPLIT:COLUMN or hub:NAME:CONFIG:SPLIT:COLUMN.")
    name, *config, split, column = parts
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise CorpusError('Hub data sets need the datasets library: pip install "dominotree[bench]".') from error
    try:
        rows = load_dataset(name, *config, split=split)
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CorpusError(f"The data set {name} cannot be read ({reason}): expected a hub id or a folder.") from error
    if column not in rows.column_names:
        raise CorpusError(
            f"The data set {name} has no column {column!r}: expected one of {', '.join(rows.column_names)}."
        )
    return [Conversation(_turns(value, f"{name} row {i}"), PurePath(name).name) for i, value in enumerate(rows[column])]


def _turns(value: object, where: str) -> tuple[str, ...]:
    turns = [value] if isinstance(value, str) else value
    if isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns):
        turns = [turn.get("content") for turn in turns if turn.get("role") == "user"]
    if not isinstance(turns, list) or not turns or not all(map(_is_text, turns)):
        raise CorpusError(f"{where}: expected a prompt, a list of turns or a list of messages: {value!r:.80}")
    return tuple(turns)


def _parse(values: object, where: str, name: str) -> Conversation:
    turns = None
    if isinstance(values, dict):
        turns = values.get("turns", [values["prompt"]] if "prompt" in values else None)
    if not isinstance(values, dict) or not isinstance(turns, list) or not turns or not all(map(_is_text, turns)):
        raise CorpusError(f'{where}: expected {{"prompt": "..."}} or {{"turns": ["..."]}}: {values!r:.80}')
    return Conversation(tuple(turns), str(values.get("source", name)))


def _is_text(turn: object) -> bool:
    """Whether it says anything and can be tokenized: half a surrogate pair cannot."""
    return isinstance(turn, str) and turn != "" and not any("\ud800" <= letter <= "\udfff" for letter in turn)


def collect(
    pair: Pair,
    conversations: Sequence[Conversation],
    out: str | Path,
    *,
    max_new_tokens: int = 384,
    temperatures: Sequence[float] = TEMPERATURES,
    batch: int = 8,
    seed: int = 0,
    report: Callable[[int, int, float], None] = lambda done, total, rate: None,
) -> tuple[int, int]:
    """Append answers to the corpus in `out`, conversation by conversation.

    Returns how many conversations it then holds, and how many of them end early: at a turn whose prompt fills the
    context. Conversation i is answered at `temperatures[i % len]` with seed `seed + i`, so a corpus does not depend on
    when it was stopped. `batch` of them are handed over and kept together, `pair.max_batch` decoded at a time.
    `report(done, total, tokens_per_second)` is called after each batch. What is there already is gone on with; raises
    `CorpusError` when it was made with other settings, or answers other conversations than the first of these.
    """
    store = _Store(
        Path(out),
        {
            "dtype": "uint16" if pair.target.vocab_size <= 1 << 16 else "uint32",
            "target": pair.name,
            "max_new_tokens": max_new_tokens,
            "temperatures": list(temperatures),
            "seed": seed,
        },
        conversations,
    )
    begun, tokens = time.monotonic(), 0
    for first in range(store.done, len(conversations), batch):
        part = range(first, min(first + batch, len(conversations)))
        rows, cut = _answer(pair, [conversations[i] for i in part], part, max_new_tokens, temperatures, seed)
        store.append(rows, done=part.stop, cut=cut)
        tokens += sum(row.answer_length for row in rows)
        report(part.stop, len(conversations), tokens / (time.monotonic() - begun))
    return store.done, store.cut


@dataclass(frozen=True)
class _Row:
    tokens: list[int]
    answer_length: int
    source: str
    temperature: float


def _answer(
    pair: Pair,
    conversations: Sequence[Conversation],
    numbers: Sequence[int],
    max_new_tokens: int,
    temperatures: Sequence[float],
    seed: int,
) -> tuple[list[_Row], int]:
    """A row for every answered turn, a conversation's turns together; how many conversations ended early."""
    from dominotree.generation import Request
    from dominotree.sampling import SamplingParams

    drafting = pair.drafting()
    heats = [temperatures[number % len(temperatures)] for number in numbers]
    messages: list[list[dict[str, str]]] = [[] for _ in conversations]
    rows: list[list[_Row]] = [[] for _ in conversations]
    full: set[int] = set()
    for turn in range(max(len(conversation.turns) for conversation in conversations)):
        requests: dict[int, Request] = {}
        for i, conversation in enumerate(conversations):
            if i in full or len(conversation.turns) <= turn:
                continue
            messages[i].append({"role": "user", "content": conversation.turns[turn]})
            prompt = pair.prompt_ids(messages[i])
            if len(prompt) >= pair.context:
                full.add(i)
                continue
            sampling = SamplingParams(temperature=heats[i], seed=seed + numbers[i], max_new_tokens=max_new_tokens)
            requests[i] = Request(prompt, sampling, drafting)
        if not requests:
            break
        asked = list(requests.values())
        for (i, request), done in zip(requests.items(), pair.decoder(asked).run(asked), strict=True):
            answer = done.new_tokens
            rows[i].append(_Row([*request.prompt, *answer], len(answer), conversations[i].source, heats[i]))
            messages[i].append({"role": "assistant", "content": done.text})
    return [row for of_one in rows for row in of_one], len(full)


def _digest(conversations: Sequence[Conversation]) -> str:
    """Tells conversations from any others."""
    return hashlib.sha256(json.dumps([conversation.turns for conversation in conversations]).encode()).hexdigest()


class _Store:
    """A corpus folder that grows; `corpus.json` counts what is complete, anything behind that is cut off."""

    def __init__(self, folder: Path, settings: dict[str, Any], conversations: Sequence[Conversation]) -> None:
        self._folder, self._settings, self._conversations = folder, settings, conversations
        self._dtype = np.dtype(TOKEN_TYPES[settings["dtype"]])
        if folder.exists() and not folder.is_dir():
            raise CorpusError(f"{folder} is a file: name a folder.")
        folder.mkdir(parents=True, exist_ok=True)
        stored = read_json(folder / "corpus.json")
        if not stored and (folder / "tokens.bin").exists():
            raise CorpusError(f"{folder} holds a corpus that was not made by `collect`: name another folder.")
        counts = [stored.get(name, 0) for name in ("conversations", "cut", "tokens.bin", "index.jsonl")]
        if any(type(count) is not int or count < 0 for count in counts):
            raise CorpusError(f"{folder / 'corpus.json'} is damaged, expected counts: restore it, or begin anew.")
        different = difference(stored, settings) if counts[0] else None  # nothing was answered before
        if different:
            raise CorpusError(f"The corpus {folder} was made with {different}: name another folder.")
        self.done, self.cut = counts[:2]
        digest = _digest(conversations[: self.done])
        if stored.get("prompts", digest) != digest:
            raise CorpusError(
                f"The corpus {folder} answers {self.done} prompts that are not the first of those given: give the same "
                "ones first and new ones behind them, or name another folder."
            )
        if not self.done:  # before there is anything that it would have to be told apart from
            self._write_counts({"tokens.bin": 0, "index.jsonl": 0})
        for name, size in zip(("tokens.bin", "index.jsonl"), counts[2:], strict=True):
            with (folder / name).open("ab") as handle:
                if handle.tell() < size:
                    raise CorpusError(
                        f"{folder / name} has {handle.tell()} bytes, corpus.json speaks of {size}: bring the whole "
                        "file back, or name another folder."
                    )
                handle.truncate(size)

    def append(self, rows: Sequence[_Row], *, done: int, cut: int) -> None:
        """Add rows; the first `done` conversations are then complete, `cut` of the new ones ended early."""
        tokens = np.array([token for row in rows for token in row.tokens], dtype=self._dtype)
        lines = [
            json.dumps([len(row.tokens) - row.answer_length, row.answer_length, row.source, row.temperature])
            for row in rows
        ]
        pieces = {
            "tokens.bin": tokens.tobytes(),
            "index.jsonl": "".join(line + "\n" for line in lines).encode(),
        }
        sizes = {}
        for name, piece in pieces.items():
            with (self._folder / name).open("ab") as handle:
                handle.write(piece)
                sizes[name] = handle.tell()
        self.done, self.cut = done, self.cut + cut
        self._write_counts(sizes)

    def _write_counts(self, sizes: Mapping[str, int]) -> None:
        counts = {"conversations": self.done, "cut": self.cut, "prompts": _digest(self._conversations[: self.done])}
        content = {**self._settings, **counts, **sizes}
        write_whole(self._folder / "corpus.json", json.dumps(content, indent=2) + "\n")
