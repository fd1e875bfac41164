"""Benchmark records: one JSON object a line, one line a turn, every table and figure made from them."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from dominotree.errors import DominoTreeError

CALIBRATION_FILE = "calibration.jsonl"
CALIBRATION_BINS = 10

_log = logging.getLogger(__name__)


class InvalidRecord(DominoTreeError):
    """A record, or a line of a records file, that does not fit the schema; the message names the field."""


class RecordKey(NamedTuple):
    """What makes a record unique: two records with one key would count one prompt twice."""

    run: str
    model: str
    method: str
    budget: int | None
    variant: str | None
    temperature: float
    dataset: str
    sample: int
    turn: int


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _is_counts(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(map(_is_count, value))


def _is_times(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_is_text(k) and _is_number(v) for k, v in value.items())


_Check = tuple[Callable[[Any], bool], str]
_TEXT: _Check = (_is_text, "a non-empty string")
_COUNT: _Check = (_is_count, "a whole number, 0 or more")
_NUMBER: _Check = (_is_number, "a finite number, 0 or more")

_REQUIRED: dict[str, _Check] = {
    "run": _TEXT,
    "model": _TEXT,
    "method": _TEXT,
    "budget": (lambda value: value is None or _is_count(value), "a whole number, 0 or more, or null"),
    "dataset": _TEXT,
    "temperature": _NUMBER,
    "sample": _COUNT,
    "turn": _COUNT,
    "new_tokens": _COUNT,
    "decode_s": _NUMBER,
    "tokens_per_s": _NUMBER,
    "mean_accepted": _NUMBER,
}
_OPTIONAL: dict[str, _Check] = {
    "rounds": _COUNT,
    "accepted": (_is_counts, "a list of whole numbers, tokens committed per round"),
    "nodes": (_is_counts, "a list of whole numbers, nodes verified per round"),
    "cap": _COUNT,
    "finish_reason": _TEXT,
    "stage_ms": (_is_times, "an object of stage names and milliseconds per round"),
    "prefill_s": _NUMBER,
    "output_sha256": _TEXT,
    "candidates": _COUNT,
    "variant": _TEXT,
}


@dataclass(frozen=True, slots=True)
class Record:
    """One measured turn of one configuration ("prompt" in the protocol means a turn).

    `decode_s` is seconds from the first draft to the last kept token (prefill, the drafter's context
    included, is `prefill_s` and not part of it); `tokens_per_s` = new_tokens / decode_s; `mean_accepted` is
    the mean over rounds of tokens committed (accepted draft tokens + 1; tau of this prompt); `accepted`
    lists them round by round, as `nodes` do the nodes verified, at most `cap` where the method sets the number
    itself; `stage_ms` is the *mean per round* in milliseconds of draft, build,
    verify and commit. `budget` is None where the method has none; `variant` labels an ablation ("M=16",
    "reference").
    Keys outside the schema are kept in `extra`.

    Raises InvalidRecord for a missing, wrongly typed, negative or non-finite field.
    """

    run: str
    model: str
    method: str
    budget: int | None
    dataset: str
    temperature: float
    sample: int
    turn: int
    new_tokens: int
    decode_s: float
    tokens_per_s: float
    mean_accepted: float
    rounds: int | None = None
    accepted: Sequence[int] | None = None
    nodes: Sequence[int] | None = None
    cap: int | None = None
    finish_reason: str | None = None
    stage_ms: Mapping[str, float] | None = None
    prefill_s: float | None = None
    output_sha256: str | None = None
    candidates: int | None = None
    variant: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, (fits, expected) in _REQUIRED.items():
            _demand(fits, name, getattr(self, name), expected)
        for name, (fits, expected) in _OPTIONAL.items():
            if (value := getattr(self, name)) is not None:
                _demand(fits, name, value, expected)

    @property
    def key(self) -> RecordKey:
        """The record's identity, for resuming and for refusing a prompt counted twice."""
        return RecordKey(*(getattr(self, name) for name in RecordKey._fields))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Record:
        """The record of one parsed line. Null and absent optional fields are the same.

        Raises InvalidRecord naming the first field that is missing or does not fit.
        """
        for name, (_, expected) in _REQUIRED.items():
            if name not in values:
                raise InvalidRecord(f"field '{name}' is missing, expected {expected}")
        known = {name: values[name] for name in (*_REQUIRED, *_OPTIONAL) if name in values}
        extra = {name: value for name, value in values.items() if name not in known}
        return cls(**known, extra=extra)

    def to_json(self) -> dict[str, Any]:
        """The JSON object of this record, optional fields that are None left out, `extra` merged in."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "extra"}
        kept = {name: value for name, value in own.items() if name in _REQUIRED or value is not None}
        return {**kept, **self.extra}


def _demand(fits: Callable[[Any], bool], name: str, value: Any, expected: str) -> None:
    if not fits(value):
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        raise InvalidRecord(f"field '{name}' is {shown}, expected {expected}")


@dataclass(frozen=True, slots=True)
class Meta:
    """What a run was measured on and with: versions, hardware, threads, dtype, seed, template, arguments.

    `runs` are the runs it describes: its own `run` key, or else every run found in the same file.
    """

    runs: tuple[str, ...]
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CalibrationBin:
    """Draft nodes of one depth whose predicted probability fell into one bin, and how many were accepted.

    `label` names the curve (the folder's runs, and the line's own `label` where it has one); probabilities
    are in [0, 1].
    """

    label: str
    depth: int
    n: int
    mean_predicted: float
    accepted_rate: float


@dataclass(frozen=True, slots=True)
class RecordSet:
    """Everything read from a list of run folders and files, in file order."""

    records: tuple[Record, ...]
    metas: tuple[Meta, ...]
    calibration: tuple[CalibrationBin, ...]


def read_records(paths: Sequence[Path]) -> RecordSet:
    """Read run folders (every `*.jsonl` in them) and single files; a path given twice is read once.

    `calibration.jsonl` in a run folder is read as calibration bins, every other file as records and metas.
    Missing optional fields are fine. Raises InvalidRecord for a path that is absent or holds no records, for
    a malformed line (naming file, line and field) and for two records of the same prompt.
    """
    files = list(dict.fromkeys(file.resolve() for path in paths for file in _files_of(path)))
    if not files:
        raise InvalidRecord("no records to read: give at least one run folder or .jsonl file")
    records: list[Record] = []
    metas: list[Meta] = []
    place_of: dict[RecordKey, str] = {}
    runs_in: dict[Path, set[str]] = {}
    for file in files:
        if file.name == CALIBRATION_FILE:
            continue
        found: list[Mapping[str, Any]] = []
        runs = runs_in.setdefault(file.parent, set())
        here: dict[str, None] = {}
        for line, item in _read_lines(file):
            if not isinstance(item, Record):
                found.append(item)
                continue
            place = f"{file.name}:{line}"
            if item.key in place_of:
                raise InvalidRecord(
                    f"{file}:{line}: this prompt was read before, at {place_of[item.key]} (run '{item.run}', "
                    f"{item.method}, {item.dataset} sample {item.sample} turn {item.turn}); "
                    "expected one record a prompt: remove one, or give the two runs different names"
                )
            place_of[item.key] = place
            records.append(item)
            here[item.run] = None
        runs.update(here)
        metas += [Meta((str(m["run"]),) if "run" in m else tuple(here), m) for m in found]
    if not records:
        names = ", ".join(str(path) for path in paths)
        raise InvalidRecord(f"no records in {names}: expected at least one line with a measured prompt")
    calibration = [
        bin_
        for file in files
        if file.name == CALIBRATION_FILE
        for bin_ in _read_calibration(file, ", ".join(sorted(runs_in.get(file.parent, {file.parent.name}))))
    ]
    return RecordSet(tuple(records), tuple(metas), tuple(calibration))


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise InvalidRecord(f"{path} does not exist: expected a run folder or a .jsonl file of records")
    if files := sorted(path.glob("*.jsonl")):
        return files
    below = sorted({file.parent.name for file in path.glob("*/*.jsonl")})
    hint = f"; its folders {', '.join(below)} do: give those" if below else ""
    raise InvalidRecord(f"{path} holds no .jsonl file of records{hint}")


def _read_lines(file: Path) -> Iterator[tuple[int, Record | Mapping[str, Any]]]:
    """Line numbers from 1 with their record, or the inner object of a meta line."""
    lines = file.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield number, _parse(line)
        except InvalidRecord as error:
            torn = number == len(lines)
            hint = "; the last line was cut off: resume the run, which repairs it, or delete it" if torn else ""
            raise InvalidRecord(f"{file}:{number}: {error}{hint}") from None


def _parse(line: bytes) -> Record | Mapping[str, Any]:
    values = _parse_object(line)
    if "meta" not in values:
        return Record.from_json(values)
    meta = values["meta"]
    if not isinstance(meta, dict):
        raise InvalidRecord(f"field 'meta' is {type(meta).__name__}, expected an object")
    return meta


def _parse_object(line: bytes) -> dict[str, Any]:
    try:
        values = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:
        raise InvalidRecord(f"not JSON ({error}), expected one JSON object a line") from None
    if not isinstance(values, dict):
        raise InvalidRecord(f"a JSON {type(values).__name__}, expected one JSON object a line")
    return values


def _read_calibration(file: Path, runs: str) -> list[CalibrationBin]:
    """Bins, or single nodes `{"depth", "predicted", "accepted"}`, put together into ten bins a depth."""
    sums: dict[tuple[str, int, int], list[float]] = {}

    def add(label: str, depth: int, n: int, predicted: float, accepted: float) -> None:
        total = sums.setdefault(
            (label, depth, min(int(predicted * CALIBRATION_BINS), CALIBRATION_BINS - 1)), [0, 0.0, 0.0]
        )
        for i, value in enumerate((n, n * predicted, n * accepted)):
            total[i] += value

    for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            values = _parse_object(line)
            label = f"{runs}: {values['label']}" if "label" in values else runs
            depth = _calibration_field(values, "depth", _COUNT)
            if "mean_predicted" in values:
                n = _calibration_field(values, "n", _COUNT)
                add(label, depth, n, _probability(values, "mean_predicted"), _probability(values, "accepted_rate"))
            else:
                predicted = _probability(values, "predicted")
                accepted = _calibration_field(
                    values, "accepted", (lambda value: value in (0, 1), "true or false, or 1 or 0")
                )
                add(label, depth, 1, predicted, bool(accepted))
        except InvalidRecord as error:
            raise InvalidRecord(f"{file}:{number}: {error}") from None
    return [
        CalibrationBin(label, depth, int(n), predicted / n, accepted / n)
        for (label, depth, _), (n, predicted, accepted) in sorted(sums.items())
        if n
    ]


def _calibration_field(values: Mapping[str, Any], name: str, check: _Check) -> Any:
    fits, expected = check
    if name not in values:
        raise InvalidRecord(f"field '{name}' is missing, expected {expected}")
    _demand(fits, name, values[name], expected)
    return values[name]


def _probability(values: Mapping[str, Any], name: str) -> float:
    check: _Check = (lambda value: _is_number(value) and value <= 1, "a probability, 0 to 1")
    return float(_calibration_field(values, name, check))


class RecordWriter:
    """Appends records to one file, each flushed to disk before `write` returns, so a run can be resumed.

    Opening an existing file reads it: `done` holds the keys of its records. A last line that was cut off by
    a crash is truncated away; `repaired` then says so in one line (and it is logged). `metas` are the meta
    objects found.

    Raises InvalidRecord where any complete line is malformed, or a record is written twice.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: set[RecordKey] = set()
        self.metas: list[Mapping[str, Any]] = []
        self.repaired: str | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        try:
            self._repair()
            for _, item in _read_lines(path):
                if isinstance(item, Record):
                    self.done.add(item.key)
                else:
                    self.metas.append(item)
        except BaseException:
            self._file.close()
            raise

    def _repair(self) -> None:
        content = self.path.read_bytes()
        kept, _, last = content.rstrip().rpartition(b"\n")
        if not last:
            return
        try:
            _parse_object(last)
        except InvalidRecord:
            self._file.truncate(len(kept) + 1 if kept else 0)
            self.repaired = f"{self.path}: the last line was cut off ({len(last)} bytes) and has been removed"
            _log.warning(self.repaired)
            return
        if not content.endswith(b"\n"):
            self._append(b"\n")

    def write(self, record: Record) -> None:
        """Append one record and flush it to disk. Raises InvalidRecord where its key is already in `done`."""
        if record.key in self.done:
            raise InvalidRecord(f"{self.path} already holds a record of {tuple(record.key)}: skip keys in `done`")
        self._append(_line(record.to_json()))
        self.done.add(record.key)

    def write_meta(self, meta: Mapping[str, Any]) -> None:
        """Append the run's meta object, unless the file holds the very same one already."""
        line = _line({"meta": dict(meta)})
        if json.loads(line)["meta"] not in self.metas:
            self._append(line)
            self.metas.append(json.loads(line)["meta"])

    def _append(self, data: bytes) -> None:
        self._file.write(data)
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; every record is on disk already."""
        self._file.close()

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _line(values: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(values, allow_nan=False).encode() + b"\n"
    except ValueError as error:
        raise InvalidRecord(f"cannot be written as JSON ({error}): expected finite numbers only") from None
