"""The benchmark: methods interleaved prompt by prompt, every turn on disk the moment it is done.

Protocol of DominoTree (arXiv 2607.08642): one stream, one warm-up per configuration, own answers fed back.
All configurations answer a turn, in an order shuffled anew each time, before any goes on, so that a machine
that becomes slower becomes slower for all. A run that was killed goes on where it was: of a conversation that
is half recorded the recorded turns are decoded again without being recorded again, since records hold no
text.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock, Timeout

from dominotree import __version__, native
from dominotree.bench.calibration import bins_of
from dominotree.bench.datasets import PromptSet
from dominotree.bench.lossless import Difference, first_difference
from dominotree.bench.records import CALIBRATION_FILE, Record, RecordKey, RecordWriter, read_records
from dominotree.errors import DominoTreeError, InvalidRequest
from dominotree.generation import Request, Round
from dominotree.machine import cpu_name, usable_cpus
from dominotree.methods import DEFAULT_BUDGET, DEFAULT_CANDIDATES, METHODS, Drafting
from dominotree.pair import Output, Pair
from dominotree.sampling import SamplingParams

if TYPE_CHECKING:
    from types import TracebackType

    from dominotree.text import Message

RECORDS_FILE = "records.jsonl"
CHECKS_FOLDER = "checks"
"""Beside the records but not among them: `differences.jsonl` and `skipped.jsonl`."""
WARM_UP_TOKENS = 16


class RunMismatch(DominoTreeError):
    """The folder holds a run that was made with something else; the message names it."""


@dataclass(frozen=True)
class Setup:
    """A method at a budget and candidate width, as it is measured: `label` is how tables name it."""

    drafting: Drafting
    variant: str | None = None

    @property
    def method(self) -> str:
        """The method's name."""
        return self.drafting.method

    @property
    def budget(self) -> int | None:
        """The budget; None for a method without a tree or with a budget of its own."""
        return self.drafting.budget if _has_budget(self.method) else None

    @property
    def candidates(self) -> int | None:
        """The candidate width; None for a method that does not choose one."""
        return self.drafting.candidates if _chooses_candidates(self.method) else None


@dataclass(frozen=True)
class Plan:
    """What to measure. `model` and `run` name the records; `seed` decides draws and the order of methods."""

    setups: tuple[Setup, ...]
    temperatures: tuple[float, ...] = (0.0,)
    max_new_tokens: int = 2048
    seed: int = 0
    run: str = "run"
    model: str = "model"

    def __post_init__(self) -> None:
        if not self.setups:
            raise InvalidRequest("no method is named; at least one is expected")
        if not self.temperatures:
            raise InvalidRequest("no temperature is named; at least one is expected")
        if any(setup.drafting.noise_aware for setup in self.setups) and not any(self.temperatures):
            raise InvalidRequest("noise-aware drafting needs draws; name a temperature above 0")
        if not self.run:
            raise InvalidRequest("the run's name is empty; give one (--run)")
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature, max_new_tokens=self.max_new_tokens, seed=self.seed)

    @property
    def units(self) -> list[Unit]:
        """Every setup at every temperature; at 0 there are no draws that a noise-aware one could look at."""
        pairs = product(self.temperatures, self.setups)
        return [Unit(setup, t) for t, setup in pairs if t > 0 or not setup.drafting.noise_aware]

    def sampling(self, unit: Unit, dataset: str, sample: int) -> SamplingParams:
        """The same draws for every method; other ones for every prompt."""
        drawn = hashlib.sha256(f"{self.seed}/{dataset}/{sample}".encode()).digest()
        return SamplingParams(
            temperature=unit.temperature,
            seed=int.from_bytes(drawn[:4], "little"),
            max_new_tokens=self.max_new_tokens,
        )

    def key(self, unit: Unit, dataset: str, sample: int, turn: int) -> RecordKey:
        """The key of a turn's record."""
        setup = unit.setup
        what = (setup.method, setup.budget, setup.variant, unit.temperature)
        return RecordKey(self.run, self.model, *what, dataset, sample, turn)


@dataclass(frozen=True)
class Unit:
    """A setup at a temperature."""

    setup: Setup
    temperature: float


ABLATIONS = {"reference-builder": "reference_builder", "sampled-candidates": "sampled_candidates"}
"""Names of what `setups` can measure conditional trees without, and the fields of `Drafting` that do it."""


def setups(
    methods: Sequence[str],
    budgets: Sequence[int] = (DEFAULT_BUDGET,),
    candidates: Sequence[int] = (DEFAULT_CANDIDATES,),
    noise_aware: Sequence[bool] = (False,),
    ablations: Sequence[str] = (),
) -> tuple[Setup, ...]:
    """Methods x budgets x candidate widths x with and without a look at the draws to come, and ablations of the first.

    Each ablation is measured once for every tree method over conditional scores, at its first budget and the default
    candidate width.

    What a method does not have does not multiply it: chains have no budget, and methods that set their own
    run once, up to their default cap. Several widths are told apart as variants "M=16" (0: "M=all"), a look
    at the draws as "noise-aware". Raises `InvalidRequest` for an unknown method or a number out of range.
    """
    unknown = [name for name in ablations if name not in ABLATIONS]
    if unknown:
        raise InvalidRequest(f"ablation {unknown[0]!r} is unknown; {', '.join(ABLATIONS)} are expected")
    made: list[Setup] = []
    ablated = False
    for method in dict.fromkeys(methods):
        kind = Drafting(method).kind
        sizes: Iterable[int | None] = dict.fromkeys(budgets) if _has_budget(method) else [None]
        widths = dict.fromkeys(candidates if _chooses_candidates(method) else [DEFAULT_CANDIDATES])
        looks = dict.fromkeys(noise_aware if kind.drafts else [False])
        for budget, width, looking in product(sizes, widths, looks):
            words = [f"M={width or 'all'}"] * (len(widths) > 1) + ["noise-aware"] * looking
            drafting = Drafting(method, budget, width, noise_aware=looking)
            made.append(Setup(drafting, ", ".join(words) or None))
        if kind.shape == "tree" and kind.score == "conditional" and kind.rule == "fixed":
            ablated = True
            for name in dict.fromkeys(ablations):
                changed: dict[str, Any] = {ABLATIONS[name]: True}
                drafting = replace(Drafting(method, next(iter(budgets), None)), **changed)
                made.append(Setup(drafting, name.replace("-", " ")))
    if ablations and not ablated:
        raise InvalidRequest("ablations are of trees over conditional scores; name dominotree among the methods")
    if not made:
        raise InvalidRequest("nothing to measure; at least one method is expected, and a budget for trees")
    return tuple(made)


def _has_budget(method: str) -> bool:
    return METHODS[method].shape == "tree" and METHODS[method].rule == "fixed"


def _chooses_candidates(method: str) -> bool:
    return METHODS[method].shape == "tree" and METHODS[method].drafter == "domino"


def check_drafters(pair: Pair, plan: Plan) -> None:
    """Raises `InvalidRequest` for a method whose kind of drafter is not at hand: none is skipped silently."""
    domino = pair.drafter is not None and pair.drafter.head is not None
    for setup in plan.setups:
        if setup.drafting.kind.drafter == "dflash" and domino and pair.dflash_drafter is None:
            raise InvalidRequest(
                f"method {setup.method} needs a DFlash drafter and only a Domino drafter is at hand; "
                "give one (--dflash-drafter) or leave it out (marginal is a tree over this one's base)"
            )
        setup.drafting.check(pair.drafter_for(setup.method))


def describe(
    pair: Pair,
    plan: Plan,
    sets: Sequence[PromptSet],
    arguments: Mapping[str, Any],
    drafters: Mapping[str, str | None],
) -> dict[str, Any]:
    """The meta record: what was measured, with what, on what."""
    target = pair.target
    template = None if pair.codec is None else pair.codec.render([{"role": "user", "content": "{prompt}"}])
    return {
        "run": plan.run,
        "model": plan.model,
        "drafters": dict(drafters),
        "dtype": target.precision,
        "device": str(target.device),
        "row_invariant": target.row_invariant,
        "native_kernels": native.available(),
        "threads": torch.get_num_threads(),
        "seed": plan.seed,
        "max_new_tokens": plan.max_new_tokens,
        "context": pair.context,
        "template": template,
        "sets": {
            s.name: {"source": s.source, "samples": len(s.samples), "turns": s.turns, "sha256": s.digest} for s in sets
        },
        "arguments": dict(arguments),
        "versions": {
            "dominotree": __version__,
            "torch": torch.__version__,
            "transformers": _version("transformers"),
            "python": platform.python_version(),
        },
        "hardware": _hardware(target.device),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _hardware(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"cpu": cpu_name(), "cores": usable_cpus(), "memory_gib": _memory_gib()}
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def _memory_gib() -> int | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    except (ValueError, OSError, AttributeError):
        return None


@dataclass(frozen=True)
class Progress:
    """How far a run is, in turns of all configurations; `doing` says what comes next."""

    done: int
    total: int
    doing: str


@dataclass
class Outcome:
    """A finished run: what its folder holds by now, `resumed` of it from earlier sittings."""

    folder: Path
    records: int = 0
    resumed: int = 0
    ended_at_once: int = 0
    differences: list[Mapping[str, Any]] = field(default_factory=list)
    skipped: list[Mapping[str, Any]] = field(default_factory=list)
    compared: bool = False

    @property
    def checks(self) -> Path:
        """Folder with the differences and the skipped prompts as files."""
        return self.folder / CHECKS_FOLDER

    @property
    def bugs(self) -> list[Mapping[str, Any]]:
        """Differences that rounding does not explain; the run has failed if there is one."""
        return [entry for entry in self.differences if entry["kind"] == "BUG"]


def run(
    pair: Pair,
    plan: Plan,
    sets: Sequence[PromptSet],
    folder: Path,
    meta: Mapping[str, Any],
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Outcome:
    """Measures what of the plan is not yet recorded in `folder`, and compares all outputs with those of `ar`.

    Raises `InvalidRequest` where a method has no drafter, `RunMismatch` where the folder holds another run or
    another process writes to it.
    """
    check_drafters(pair, plan)
    with _Folder(folder, meta) as store:
        return _Runner(pair, plan, sets, store, on_progress).run()


class _Folder(AbstractContextManager["_Folder"]):
    """A run's folder: records, differences, skipped prompts. One process at a time."""

    def __init__(self, path: Path, meta: Mapping[str, Any]) -> None:
        self.path = path
        try:
            (path / CHECKS_FOLDER).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunMismatch(f"{path} cannot be made a folder ({error.strerror}); choose another (--out)") from error
        with ExitStack() as opened:
            try:
                opened.enter_context(FileLock(path / CHECKS_FOLDER / ".lock", timeout=0))
            except Timeout:
                raise RunMismatch(
                    f"another process is writing to {path}; wait for it or choose another folder (--out)"
                ) from None
            self.records = opened.enter_context(RecordWriter(path / RECORDS_FILE))
            self._check(meta)
            self.records.write_meta(meta)
            self.digests: dict[RecordKey, str | None] = {}
            self.rounds: dict[RecordKey, int | None] = {}
            if self.records.done:
                for record in read_records([path / RECORDS_FILE]).records:
                    self._note(record)
            self.differences = opened.enter_context(_Lines(path / CHECKS_FOLDER / "differences.jsonl"))
            self.skipped = opened.enter_context(_Lines(path / CHECKS_FOLDER / "skipped.jsonl"))
            self.calibration = opened.enter_context(_Lines(path / CALIBRATION_FILE))
            self._opened = opened.pop_all()

    def write(self, record: Record) -> None:
        """Puts a record on disk."""
        self.records.write(record)
        self._note(record)

    def _note(self, record: Record) -> None:
        self.digests[record.key], self.rounds[record.key] = record.output_sha256, record.rounds

    def _check(self, meta: Mapping[str, Any]) -> None:
        held = self.records.metas
        if self.records.done and not held:
            raise RunMismatch(f"{self.path} holds records that no bench made; choose another folder (--out)")
        for earlier in held:
            found = _first_change(earlier, json.loads(json.dumps(meta)))
            if found is not None:
                name, before, now = found
                raise RunMismatch(
                    f"{self.path} holds a run with {name} {before!r:.80}, and now it is {now!r:.80}; choose "
                    "another folder (--out), or run as before"
                )

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._opened.close()


def _first_change(before: Any, now: Any, name: str = "") -> tuple[str, Any, Any] | None:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*_arguments_first(before), *_arguments_first(now)]):
            found = _first_change(before.get(key), now.get(key), f"{name}.{key}" if name else str(key))
            if found is not None:
                return found
        return None
    return None if before == now else (name, before, now)


def _arguments_first(values: Mapping[str, Any]) -> list[str]:
    """What the user typed explains a change better than what follows from it."""
    return sorted(values, key=lambda key: key != "arguments")


class _Lines(AbstractContextManager["_Lines"]):
    """A file of JSON objects, one a line, that survives being cut off."""

    def __init__(self, path: Path) -> None:
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        self.entries: list[Mapping[str, Any]] = [json.loads(line) for line in whole.splitlines()]
        self._file = path.open("ab")
        self._file.truncate(len(whole))

    def append(self, *entries: Mapping[str, Any]) -> None:
        """Writes entries and flushes them to disk."""
        self._file.write(b"".join(json.dumps(entry, allow_nan=False).encode() + b"\n" for entry in entries))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.entries += entries

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._file.close()


@dataclass(frozen=True)
class _Sample:
    """One conversation of a set."""

    dataset: str
    number: int
    turns: tuple[str, ...]


class _TooLong(Exception):
    """A prompt that leaves no room for an answer; carries why."""


class _Talk:
    """A unit's conversation over one sample, decoded as far as it is asked for."""

    def __init__(self, pair: Pair, unit: Unit, sampling: SamplingParams, turns: Sequence[str]) -> None:
        self._pair, self._turns = pair, turns
        self.unit, self.sampling = unit, sampling
        self._messages: list[Message] = []
        self._answers: list[tuple[list[int], Output]] = []
        self.rounds: list[Round] = []
        """Of the last answer."""

    def answer(self, turn: int) -> tuple[list[int], Output]:
        """Prompt ids and output of a turn; raises `_TooLong`. Turns before it are decoded first."""
        while len(self._answers) <= turn:
            messages = [*self._messages, {"role": "user", "content": self._turns[len(self._answers)]}]
            ids = self._pair.prompt_ids(messages)
            if len(ids) >= self._pair.context:
                raise _TooLong(f"the prompt has {len(ids)} tokens and the context is {self._pair.context}")
            self.rounds = []
            drafting = self.unit.setup.drafting
            output = generate(self._pair, ids, self.sampling, drafting, recorder=self.rounds.append)
            self._messages = [*messages, {"role": "assistant", "content": output.text}]
            self._answers.append((ids, output))
        return self._answers[turn]


def generate(
    pair: Pair,
    ids: Sequence[int],
    sampling: SamplingParams,
    drafting: Drafting,
    recorder: Callable[[Round], None] | None = None,
) -> Output:
    """One answer, decoded alone."""
    request = Request(list(ids), sampling, drafting, recorder=recorder)
    return Output.of(pair.decoder([request]).run([request])[0])


def output_digest(token_ids: Sequence[int]) -> str:
    """sha256 of an answer's token ids, written in decimal and joined by commas."""
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()


def record_of(
    key: RecordKey, output: Output, *, candidates: int | None, cap: int | None = None, **extra: Any
) -> Record:
    """The record of a turn; an answer that its first token ends has no round, 0 tokens/s and tau 1."""
    stats = output.stats
    rounds = stats.rounds
    return Record(
        **key._asdict(),
        new_tokens=stats.new_tokens,
        decode_s=stats.decode_s,
        tokens_per_s=stats.tokens_per_s,
        mean_accepted=stats.mean_accepted if rounds else 1.0,
        rounds=rounds,
        accepted=list(stats.accepted),
        nodes=list(stats.nodes),
        cap=cap,
        finish_reason=output.finish_reason,
        stage_ms={stage: ms / rounds for stage, ms in stats.stage_ms.items()} if rounds else None,
        prefill_s=stats.prefill_s,
        output_sha256=output_digest(output.token_ids),
        candidates=candidates,
        extra={"prompt_tokens": stats.prompt_tokens, **extra},
    )


class _Runner:
    def __init__(
        self,
        pair: Pair,
        plan: Plan,
        sets: Sequence[PromptSet],
        store: _Folder,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._pair, self._plan, self._store = pair, plan, store
        self._samples = [_Sample(s.name, i, turns) for s in sets for i, turns in enumerate(s.samples)]
        self._total = len(plan.units) * sum(s.turns for s in sets)
        self._on_progress = on_progress
        self._skipped = {_identity(entry) for entry in store.skipped.entries}
        self._listed = {_identity(entry) for entry in store.differences.entries}
        self._calibrated = _widest_trees(plan.units)

    def run(self) -> Outcome:
        resumed = len(self._store.records.done)
        self._warm_up()
        for sample in self._samples:
            self._converse(sample)
        rounds = self._store.rounds
        return Outcome(
            self._store.path,
            records=len(rounds),
            resumed=resumed,
            ended_at_once=sum(count == 0 for count in rounds.values()),
            differences=list(self._store.differences.entries),
            skipped=list(self._store.skipped.entries),
            compared=any(s.method == "ar" for s in self._plan.setups) and len(self._plan.setups) > 1,
        )

    def _warm_up(self) -> None:
        """One short answer by every unit with something left to do: first passes of a process are slow."""
        for unit in self._plan.units:
            sample = next((s for s in self._samples if self._unfinished(unit, s)), None)
            if sample is None:
                continue
            self._say(f"warm-up {_label(unit)}")
            sampling = self._plan.sampling(unit, sample.dataset, sample.number)
            length = min(WARM_UP_TOKENS, sampling.max_new_tokens)
            short = replace(sampling, max_new_tokens=length, ignore_eos=True)
            ids = self._pair.prompt_ids([{"role": "user", "content": sample.turns[0]}])
            generate(self._pair, ids[: self._pair.context - 1], short, unit.setup.drafting)

    def _converse(self, sample: _Sample) -> None:
        talk = partial(self._talk, sample)
        talks = {unit: talk(unit) for unit in self._plan.units}
        parted: set[Unit] = set()
        for turn in range(len(sample.turns)):
            for unit in self._order(sample, turn):
                if self._missing(unit, sample, turn):
                    self._measure(talks[unit], sample, turn)
            self._compare(talks, sample, turn, parted)
        self._say(f"{sample.dataset} {sample.number + 1}")

    def _talk(self, sample: _Sample, unit: Unit) -> _Talk:
        sampling = self._plan.sampling(unit, sample.dataset, sample.number)
        return _Talk(self._pair, unit, sampling, sample.turns)

    def _order(self, sample: _Sample, turn: int) -> list[Unit]:
        units = self._plan.units
        random.Random(f"{self._plan.seed}/{sample.dataset}/{sample.number}/{turn}").shuffle(units)
        return units

    def _key(self, unit: Unit, sample: _Sample, turn: int) -> RecordKey:
        return self._plan.key(unit, sample.dataset, sample.number, turn)

    def _missing(self, unit: Unit, sample: _Sample, turn: int) -> bool:
        key = self._key(unit, sample, turn)
        return key not in self._store.digests and key not in self._skipped

    def _unfinished(self, unit: Unit, sample: _Sample) -> bool:
        return any(self._missing(unit, sample, turn) for turn in range(len(sample.turns)))

    def _measure(self, talk: _Talk, sample: _Sample, turn: int) -> None:
        key = self._key(talk.unit, sample, turn)
        self._say(f"{sample.dataset} {sample.number + 1} {_label(talk.unit)}")
        try:
            _, output = talk.answer(turn)
        except _TooLong as error:
            self._skip(talk.unit, sample, turn, str(error))
            return
        drafting = talk.unit.setup.drafting
        cap = None if drafting.kind.rule == "fixed" else drafting.most_nodes
        self._store.write(record_of(key, output, candidates=talk.unit.setup.candidates, cap=cap, seed=output.seed))
        if talk.unit in self._calibrated:
            self._store.calibration.append(*bins_of(_label(talk.unit), talk.rounds))

    def _skip(self, unit: Unit, sample: _Sample, first: int, reason: str) -> None:
        for turn in range(first, len(sample.turns)):
            key = self._key(unit, sample, turn)
            why = reason if turn == first else f"turn {first} of this conversation was skipped"
            self._store.skipped.append({**key._asdict(), "reason": why})
            self._skipped.add(key)

    def _compare(self, talks: Mapping[Unit, _Talk], sample: _Sample, turn: int, parted: set[Unit]) -> None:
        """Compares a turn's outputs with plain decoding's, in conversations that have not parted yet."""
        digests = self._store.digests
        plain = {unit.temperature: unit for unit in talks if unit.setup.method == "ar"}
        for unit in talks:
            key = self._key(unit, sample, turn)
            if unit.temperature not in plain or unit in parted or key not in digests:
                continue
            reference = plain[unit.temperature]
            if digests[key] == digests.get(self._key(reference, sample, turn)):
                continue
            parted.add(unit)
            if key not in self._listed:
                self._say(f"{sample.dataset} {sample.number + 1} {_label(unit)}: a difference")
                found = self._difference(talks[reference], talks[unit], turn)
                self._store.differences.append({**key._asdict(), **found.to_json()})
                self._listed.add(key)

    def _difference(self, plain: _Talk, other: _Talk, turn: int) -> Difference:
        ids, expected = plain.answer(turn)
        _, output = other.answer(turn)
        drafting = other.unit.setup.drafting
        found = first_difference(self._pair, ids, expected, output, other.sampling, drafting=drafting)
        again = "the recorded answers differ, and decoded again they do not"
        return found or Difference(0, None, None, "BUG", again)

    def _say(self, doing: str) -> None:
        self._on_progress(Progress(len(self._store.digests) + len(self._skipped), self._total, doing))


def _widest_trees(units: Sequence[Unit]) -> set[Unit]:
    """Of every tree method at every temperature the first with the largest budget: what its nodes came to is kept."""
    widest: dict[tuple[str, float], Unit] = {}
    for unit in units:
        if METHODS[unit.setup.method].shape == "tree":
            best = widest.setdefault((unit.setup.method, unit.temperature), unit)
            if (unit.setup.budget or 0) > (best.setup.budget or 0):
                widest[unit.setup.method, unit.temperature] = unit
    return set(widest.values())


def _identity(entry: Mapping[str, Any]) -> RecordKey:
    return RecordKey(*(entry[name] for name in RecordKey._fields))


def _label(unit: Unit) -> str:
    setup = unit.setup
    budget = "" if setup.budget is None else f"@{setup.budget}"
    return f"{setup.method}{budget}{f' {setup.variant}' if setup.variant else ''} T={unit.temperature:g}"


def describe_difference(entry: Mapping[str, Any]) -> str:
    """One line about an entry of `differences.jsonl`."""
    budget = "" if entry["budget"] is None else f"@{entry['budget']}"
    margin = "" if entry["margin"] is None else f", margin {entry['margin']:.3g}"
    where = "{dataset} sample {sample} turn {turn} T={temperature:g}, token {position}".format(**entry)
    return f"{entry['kind']}: {entry['method']}{budget}, {where}{margin}: {entry['reason']}"


__all__ = [
    "Outcome",
    "Plan",
    "Progress",
    "RunMismatch",
    "Setup",
    "check_drafters",
    "describe",
    "run",
    "setups",
]
