"""The prompts a benchmark runs over: the eight sets of the protocol, local JSONL, or those that ship here."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module, resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dominotree.bench.statistics import GROUPS
from dominotree.errors import InvalidRequest, ModelNotFound

SHUFFLE_SEED = 0
PROMPTS_PER_SET = 50
BUILTIN = "builtin"
BUILTIN_SETS = ("builtin-math", "builtin-code", "builtin-chat")

Turns = tuple[str, ...]


class DataUnavailable(ModelNotFound):
    """A data set of the hub that cannot be fetched here."""


@dataclass(frozen=True)
class PromptSet:
    """A data set: `samples[i]` are the user's turns of conversation i, `source` says where they are from."""

    name: str
    samples: tuple[Turns, ...]
    source: str

    @property
    def turns(self) -> int:
        """User turns of all samples together."""
        return sum(map(len, self.samples))

    @property
    def digest(self) -> str:
        """sha256 over all turns, so that a run is never resumed on other prompts."""
        return hashlib.sha256(json.dumps(self.samples).encode()).hexdigest()

    def first(self, count: int | None) -> PromptSet:
        """The set cut to its first `count` samples (None: all)."""
        return self if count is None else PromptSet(self.name, self.samples[:count], self.source)


def load_sets(
    names: Sequence[str] | None = None, *, data: Path | None = None, limit: int | None = None
) -> list[PromptSet]:
    """The named sets, each cut to its first `limit` conversations.

    A name is one of `HUB_SETS`, of `BUILTIN_SETS`, or `builtin` for all of these; with `data`, a folder, it
    is a file `NAME.jsonl` in it. Without names: all files of `data`, or `builtin`. Raises `InvalidRequest`
    for a set that is unknown, empty or malformed, and `DataUnavailable` where the hub cannot be reached.
    """
    if limit is not None and limit < 1:
        raise InvalidRequest(f"limit is {limit}; a positive integer is expected, or none for all prompts")
    if data is not None and not data.is_dir():
        raise InvalidRequest(f"the folder {data} does not exist; one with files NAME.jsonl is expected")
    if names is None:
        names = [BUILTIN] if data is None else sorted(file.stem for file in data.glob("*.jsonl"))
    wanted = [part for name in names for part in (BUILTIN_SETS if name == BUILTIN else (name,))]
    if not wanted:
        where = f"{data} holds no .jsonl file" if data is not None else "no set is named"
        raise InvalidRequest(f"{where}; at least one set is expected")
    for name in wanted:
        _check_name(name, data)
    return [_load(name, data).first(limit) for name in dict.fromkeys(wanted)]


def _check_name(name: str, data: Path | None) -> None:
    if name in GROUPS:
        raise InvalidRequest(f"a set cannot be named {name!r}, the name of a group average; rename its file")
    if name in BUILTIN_SETS:
        return
    if data is None:
        if name not in HUB_SETS:
            raise InvalidRequest(
                f"set {name!r} is unknown; {', '.join(HUB_SETS)} or {BUILTIN} is expected, "
                "or a file of your own (--data)"
            )
    elif not _file(data, name).is_file():
        found = ", ".join(sorted(file.stem for file in data.glob("*.jsonl"))) or "none"
        raise InvalidRequest(f"set {name!r} has no file {name}.jsonl in {data}; sets there: {found}")


def _load(name: str, data: Path | None) -> PromptSet:
    if name in BUILTIN_SETS:
        text = resources.files("dominotree.bench") / "builtin" / f"{name.removeprefix('builtin-')}.jsonl"
        return PromptSet(name, parse_samples(text.read_bytes(), f"{name}.jsonl"), "dominotree")
    if data is not None:
        return read_set(_file(data, name))
    return PromptSet(name, HUB_SETS[name].samples(), HUB_SETS[name].repo)


def _file(data: Path, name: str) -> Path:
    return data / f"{name}.jsonl"


def read_set(file: Path) -> PromptSet:
    """A set from a local file, one object `{"turns": [...]}` a line; its name is the file's."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read ({error.strerror}); prompts are expected") from error
    return PromptSet(file.stem, parse_samples(content, str(file)), file.name)


def parse_samples(content: bytes, file: str) -> tuple[Turns, ...]:
    """The conversations of a JSONL file. Blank lines are skipped, other keys than `turns` disregarded.

    Raises `InvalidRequest` naming file and line for a malformed line, and for a file without a prompt.
    """
    samples = []
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if line.strip():
            try:
                samples.append(_turns(json.loads(line.decode())))
            except (ValueError, RecursionError) as error:
                raise InvalidRequest(
                    f'{file}:{number}: {error}; an object {{"turns": ["..."]}} is expected on each line'
                ) from None
    if not samples:
        raise InvalidRequest(f'{file} holds no prompt; at least one line {{"turns": [...]}} is expected')
    return tuple(samples)


def _turns(values: Any) -> Turns:
    if not isinstance(values, dict):
        raise ValueError(f"a JSON {type(values).__name__}")
    if "turns" not in values:
        raise ValueError("'turns' is missing")
    turns = values["turns"]
    if not isinstance(turns, list) or not turns:
        raise ValueError("'turns' is not a list with at least one turn")
    for turn in turns:
        if not isinstance(turn, str) or not turn.strip():
            raise ValueError(f"the turn {turn!r:.40} is no text")
        turn.encode()  # half a surrogate pair cannot be tokenized
    return tuple(turns)


# The hub


@dataclass(frozen=True)
class HubSet:
    """A data set of the hub: where it is and how one of its rows becomes the user's turns."""

    repo: str
    split: str
    turns: Callable[[Mapping[str, Any]], Sequence[str]]
    config: str | None = None
    files: tuple[str, ...] = ()
    """Files to read directly, where the repository's own loader is a script, which is never run."""

    def samples(self) -> tuple[Turns, ...]:
        """The protocol's prompts: shuffled with seed 0, the first 50. Raises `DataUnavailable`."""
        if find_spec("datasets") is None:
            raise DataUnavailable(
                f"{self.repo} is read with the package datasets, which is not installed; "
                "pip install 'dominotree[bench]', or give local files (--data)"
            )
        hub = import_module("datasets")
        for noisy in ("datasets", "huggingface_hub"):  # retries are told at length, and then told again by us
            logging.getLogger(noisy).setLevel(logging.ERROR)
        try:
            if self.files:
                urls = [f"hf://datasets/{self.repo}/{file}" for file in self.files]
                rows = hub.load_dataset("json", data_files={self.split: urls}, split=self.split)
            else:
                rows = hub.load_dataset(self.repo, self.config, split=self.split)
        except Exception as error:
            reason = next(iter(str(error).strip().splitlines()), "")
            raise DataUnavailable(
                f"the data set {self.repo} cannot be fetched ({type(error).__name__}: {reason}); "
                "connect to the hub, or use --sets builtin or local files (--data)"
            ) from error
        rows = rows.shuffle(seed=SHUFFLE_SEED)
        rows = rows.select(range(min(PROMPTS_PER_SET, len(rows))))
        return tuple(tuple(self.turns(row)) for row in rows)


def _math(column: str) -> Callable[[Mapping[str, Any]], Sequence[str]]:
    request = "Please reason step by step, and put your final answer within \\boxed{}."
    return lambda row: [f"{row[column]}\n{request}"]


def _humaneval(row: Mapping[str, Any]) -> Sequence[str]:
    request = "Write a solution to the following problem and make sure that it passes the tests:"
    return [f"{request}\n```python\n{row['prompt']}\n```"]


def _livecodebench(row: Mapping[str, Any]) -> Sequence[str]:
    role = (
        "You are an expert Python programmer. You will be given a question (problem specification) and will "
        "generate a correct Python program that matches the specification and passes all tests. You will NOT "
        "return anything except for the program"
    )
    starter = row.get("starter_code")
    form = "Use the following code structure:" if starter else "Write your code in the following format:"
    parts = (
        role,
        f"### Question:\n{row['question_content']}",
        f"### Format: {form}\n```python\n{starter or '# YOUR CODE HERE'}\n```",
        "### Answer: (use the provided format with backticks)",
    )
    return ["\n\n".join(parts)]


def _alpaca(row: Mapping[str, Any]) -> Sequence[str]:
    given = row.get("input")
    return [f"{row['instruction']}\n\nInput:\n{given}" if given else row["instruction"]]


def _as_it_is(row: Mapping[str, Any]) -> Sequence[str]:
    prompt = row["prompt"]
    return [prompt] if isinstance(prompt, str) else list(prompt)


HUB_SETS: dict[str, HubSet] = {
    "gsm8k": HubSet("openai/gsm8k", "test", _math("question"), config="main"),
    "math500": HubSet("HuggingFaceH4/MATH-500", "test", _math("problem")),
    "aime25": HubSet("MathArena/aime_2025", "train", _math("problem")),
    "humaneval": HubSet("openai/openai_humaneval", "test", _humaneval),
    "mbpp": HubSet("google-research-datasets/mbpp", "test", _as_it_is, config="sanitized"),
    "livecodebench": HubSet(
        "livecodebench/code_generation_lite",
        "test",
        _livecodebench,
        files=("test.jsonl", *(f"test{part}.jsonl" for part in range(2, 7))),
    ),
    "mt-bench": HubSet("HuggingFaceH4/mt_bench_prompts", "train", _as_it_is),
    "alpaca": HubSet("tatsu-lab/alpaca", "train", _alpaca),
}
