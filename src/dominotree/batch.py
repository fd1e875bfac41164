"""Many prompts from a file: each line's request, decoding them together, records that survive a kill.

A record depends on its line, the line's number and the job alone: not on what is decoded beside it, nor where.
"""

from __future__ import annotations

import codecs
import filecmp
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from dominotree.decode import Decoder
from dominotree.errors import DominoTreeError, InvalidRequest
from dominotree.generation import Generation, Request
from dominotree.methods import Drafting
from dominotree.pair import Output, Pair
from dominotree.sampling import SamplingParams
from dominotree.text import Prompt, is_token_ids

OPTIONS = tuple(f.name for f in fields(SamplingParams) if f.name != "logits_processors")
"""What a line may set for itself."""

Record = dict[str, Any]

_BEGINNING = b'{"started_with"'


@dataclass(frozen=True)
class Line:
    """A line of the input; `number` counts from 1, blank lines too."""

    number: int
    text: bytes


@dataclass(frozen=True)
class Job:
    """What holds for every line that does not say otherwise; `form` is `raw` or `system`.

    A line without a seed of its own draws with one made of `seed` and its number.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    form: Mapping[str, Any] = field(default_factory=dict)


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of a file that are not blank. Raises `InvalidRequest` for a file that cannot be read, or only once."""
    if path.exists() and not path.is_file():
        raise InvalidRequest(f"{path} is no regular file, and is read several times; save the prompts to a file first")
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                text = text.removeprefix(codecs.BOM_UTF8) if number == 1 else text
                if text.strip():
                    yield Line(number, text.strip())
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read ({error.strerror}); a JSONL file is expected") from error


def line_seed(seed: int, number: int) -> int:
    """The seed of a line that names none, 63 bits."""
    digest = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


# From a line to a request


def request_of(line: Line, pair: Pair, job: Job, drafting: Drafting) -> Request:
    """The request of a line. Raises `InvalidRequest` for one that can never run on `pair`."""
    values = _parse(line.text)
    _identity(values)
    if ("prompt" in values) == ("messages" in values):
        raise InvalidRequest("one of prompt and messages is expected")
    unknown = next((name for name in values if name not in ("id", "prompt", "messages", *OPTIONS)), None)
    if unknown is not None:
        expected = ", ".join(("id", "prompt", "messages", *OPTIONS))
        raise InvalidRequest(f"field {unknown!r} is unknown; {expected} are known")
    options = {name: value for name, value in values.items() if name in OPTIONS}
    if isinstance(options.get("logit_bias"), dict):
        options["logit_bias"] = _with_token_ids(options["logit_bias"])
    sampling = replace(job.sampling, **options)
    if sampling.seed is None:
        sampling = replace(sampling, seed=line_seed(job.seed, line.number))
    request = Request(pair.prompt_ids(_prompt(values), **_form(values, job)), sampling, drafting)
    target = pair.target
    Generation(request, pair.codec, target.vocab_size, target.eos_token_ids, pair.context)  # raises for what cannot run
    return request


def _parse(text: bytes) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the line is not JSON ({error}); one object a line is expected") from None
    if not isinstance(values, dict):
        raise InvalidRequest(f"the line is a JSON {type(values).__name__}; an object is expected")
    return values


def _identity(values: Mapping[str, Any]) -> Record:
    """The line's own `id`, where it has one."""
    if "id" not in values:
        return {}
    given = values["id"]
    if not isinstance(given, (str, int)) or isinstance(given, bool):
        raise InvalidRequest(f"id is {json.dumps(given)[:60]}; a string or an integer is expected")
    return {"id": given}


def _prompt(values: Mapping[str, Any]) -> Prompt:
    if "messages" in values:
        messages = values["messages"]
        if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
            raise InvalidRequest("messages is no list of objects with role and content, at least one")
        _check_text(json.dumps(messages, ensure_ascii=False))
        return messages
    prompt = values["prompt"]
    if isinstance(prompt, str):
        _check_text(prompt)
        return prompt
    if isinstance(prompt, list) and prompt and is_token_ids(prompt):
        return prompt
    raise InvalidRequest("prompt is neither text nor a list of token ids")


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest("the prompt holds half a character (a lone surrogate); whole ones are expected") from None


def _form(values: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """How the prompt becomes a conversation; a system message opens those that have none of their own."""
    if isinstance(values.get("prompt"), str):
        return dict(job.form)
    messages = values.get("messages")
    own = not messages or messages[0].get("role") == "system"
    return {} if own or "system" not in job.form else {"system": job.form["system"]}


def _with_token_ids(biases: Mapping[str, Any]) -> dict[int, Any]:
    try:
        return {int(token): bias for token, bias in biases.items()}
    except ValueError:
        raise InvalidRequest("logit_bias is no object from token ids to numbers") from None


# From requests to records


def records(pair: Pair, lines: Iterable[Line], job: Job, drafting: Drafting, decoder: Decoder) -> Iterator[Record]:
    """The record of every line, as they come: sequences join the batch as soon as others leave it.

    `decoder` is one with `room` for the lines. A line that cannot run gives a record with `error`.
    """
    waiting = iter(lines)
    running: list[tuple[Line, Generation]] = []
    try:
        while True:
            while len(running) < decoder.slots and (line := next(waiting, None)) is not None:
                try:
                    running.append((line, decoder.add(request_of(line, pair, job, drafting))))
                except DominoTreeError as error:
                    yield _failed(line, error)
            if not running:
                return
            fault = _step(decoder, [generation for _, generation in running])
            for entry in [entry for entry in running if entry[1].finished]:
                running.remove(entry)
                line, generation = entry
                if generation.finish_reason == "abort":
                    assert fault is not None
                    yield _failed(line, fault)
                else:
                    output = Output.of(generation)
                    pair._judge(output)
                    yield _answered(line, output)
    finally:
        for _, generation in running:
            decoder.abort(generation)


def _step(decoder: Decoder, running: Iterable[Generation]) -> DominoTreeError | None:
    """One round; the error of a request that it ended."""
    try:
        decoder.step()
    except DominoTreeError as error:
        if not any(generation.finish_reason == "abort" for generation in running):
            raise
        return error
    return None


def room(pair: Pair, lines: Iterable[Line], job: Job, drafting: Drafting) -> Decoder:
    """A decoder of at most `pair.max_batch` slots in which every line that can run has room.

    Raises `InvalidRequest` where no line can be drafted for as `drafting` says.
    """
    longest, most, count = Request([0], SamplingParams(max_new_tokens=1), drafting), 0, 0
    for line in lines:
        count += 1
        with suppress(DominoTreeError):
            request = request_of(line, pair, job, drafting)
            tokens = len(request.prompt) + request.sampling.max_new_tokens
            if tokens > most:
                longest, most = request, tokens
    decoder = pair.decoder([longest] * max(1, min(count, pair.max_batch)))
    decoder.abort(decoder.add(longest))  # what it refuses is wrong with the job, not with a line
    return decoder


def _answered(line: Line, output: Output) -> Record:
    logprobs = {} if output.logprobs is None else {"logprobs": [asdict(found) for found in output.logprobs]}
    return {
        "line": line.number,
        **_identity(_parse(line.text)),
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "prompt_tokens": output.stats.prompt_tokens,
        "new_tokens": output.stats.new_tokens,
        "seed": output.seed,
        **logprobs,
    }


def _failed(line: Line, error: DominoTreeError) -> Record:
    known: Record = {}
    with suppress(InvalidRequest):
        known = _identity(_parse(line.text))
    return {"line": line.number, **known, "error": " ".join(str(error).split())}


# Records on disk


def digest(path: Path) -> str:
    """What tells whether a file has changed."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Results:
    """The records of a run on their way: `OUTPUT.part` as they come, and `OUTPUT` in the input's order at the end.

    The part file begins with what the run was started with, so that a run goes on only as it began; a last line that
    was cut off is removed, and its prompt decoded again. One process at a time.
    """

    def __init__(self, output: Path, started_with: Mapping[str, Any]) -> None:
        """Raises `InvalidRequest` where `output` is there already, or its part belongs to another run."""
        self.output, self.part = output, output.with_name(output.name + ".part")
        if not output.parent.is_dir():
            raise InvalidRequest(f"the folder {output.parent} does not exist; make it first")
        if output.exists() and not self.part.exists():
            raise InvalidRequest(f"{output} is there already; remove it or name another output")
        self._places: dict[int, tuple[int, int]] = {}
        self.failed = self.new_tokens = 0
        self._lock = FileLock(output.with_name(f".{output.name}.lock"), timeout=0)
        try:
            self._lock.acquire()
        except Timeout:
            raise InvalidRequest(f"another process writes {output}; wait for it, or name another output") from None
        self._file = self.part.open("a+b")
        try:
            self._open(json.loads(json.dumps(started_with)))
        except BaseException:
            self.close()
            raise

    def __contains__(self, number: int) -> bool:
        """Whether the line of that number has its record."""
        return number in self._places

    def __len__(self) -> int:
        return len(self._places)

    def write(self, record: Record) -> None:
        """Appends a record, on its way to the disk when this returns; a line's second one is left out."""
        if record["line"] not in self:
            self._places[record["line"]] = self._append(record)
            self._count(record)

    def finish(self) -> None:
        """Makes the output of the records, in the input's order, and removes the part."""
        scratch = self.output.with_name(f".{self.output.name}.tmp")
        with scratch.open("wb") as out:
            for number in sorted(self._places):
                start, size = self._places[number]
                self._file.seek(start)
                out.write(self._file.read(size))
            out.flush()
            os.fsync(out.fileno())
        if self.output.exists() and not filecmp.cmp(scratch, self.output, shallow=False):
            scratch.unlink()
            raise InvalidRequest(
                f"{self.output} has come to be meanwhile; move it away, the records are in {self.part}"
            )
        scratch.replace(self.output)
        self.part.unlink()

    def close(self) -> None:
        """Lets others write."""
        self._file.close()
        with suppress(OSError):
            Path(self._lock.lock_file).unlink()
        self._lock.release()

    def __enter__(self) -> Results:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _open(self, started_with: Mapping[str, Any]) -> None:
        self._file.seek(0)
        first = self._file.readline()
        if first and not first.startswith(_BEGINNING[: len(first)]):
            raise InvalidRequest(f"{self.part} is not of a batch; move it away")
        if not first.endswith(b"\n"):  # new, or cut off before anything was decoded
            self._file.truncate(0)
            self._append({"started_with": started_with})
            return
        try:
            before = dict(json.loads(first)["started_with"])
        except (ValueError, TypeError, KeyError):
            raise InvalidRequest(f"{self.part} is not of a batch; move it away") from None
        for name in {**before, **started_with}:
            if before.get(name) != started_with.get(name):
                raise InvalidRequest(_changed(self.part, name, before.get(name), started_with.get(name)))
        start = len(first)
        for number, text in enumerate(self._file, start=2):
            if not text.endswith(b"\n"):
                self._file.truncate(start)
                return
            try:
                record = json.loads(text)
                self._places[record["line"]] = start, len(text)
            except (ValueError, TypeError, KeyError):
                raise InvalidRequest(f"line {number} of {self.part} is no record; remove that line") from None
            self._count(record)
            start += len(text)

    def _append(self, values: Mapping[str, Any]) -> tuple[int, int]:
        """Writes a line; returns where it begins and its length in bytes."""
        start, text = self._file.seek(0, os.SEEK_END), json.dumps(values).encode() + b"\n"
        self._file.write(text)
        self._file.flush()
        return start, len(text)

    def _count(self, record: Record) -> None:
        self.failed += "error" in record
        self.new_tokens += record.get("new_tokens", 0)


def _changed(part: Path, name: str, before: Any, now: Any) -> str:
    if name == "input":
        return f"the input has changed since the run in {part} began; restore it, or remove that file to begin anew"
    return (
        f"the run in {part} began with {name} {json.dumps(before)} and is given {json.dumps(now)}; "
        "give the same, or remove that file to begin anew"
    )
