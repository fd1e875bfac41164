"""A fleet simulated from what was measured: the cost profile of a machine and recorded acceptance.

Every replica steps as the server's engine does: it admits requests to free slots, encodes one chunk of each new
prompt, then decodes one round of all its sequences; what a step brings is seen when it ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import simpy

from dominotree.bench.records import Record
from dominotree.costs import CostModel
from dominotree.decode import PREFILL_CHUNK
from dominotree.errors import InvalidRequest

ASSUMPTIONS = (
    "every replica is the machine that the profile was measured on, and requests go to the one with the fewest",
    "requests resemble the recorded prompts; a sequence commits what was recorded for its prompt, round by round",
    "rows that sequences share are split evenly, so every tree is cut to the same size; the server keeps the likeliest "
    "nodes of all, which accepts more",
    "between recorded budgets acceptance is linear",
    "passes and drafts cost what the profile says of one sequence and adds for each further one, at the mean context; "
    "building grows with the nodes of all, committing with the sequences",
    "no prompt has anything cached, no request is cancelled, nothing fails, networks and tokenizers cost nothing",
)

MOST_TOKENS = 1_000_000
_CONTEXT_STEP = 64


@dataclass(frozen=True)
class Prompt:
    """What was recorded of one prompt: `accepted[budget]` are the tokens committed per round; budget 0 is plain."""

    prompt_tokens: int | None
    new_tokens: int
    accepted: Mapping[int, Sequence[int]]


@dataclass(frozen=True)
class Acceptance:
    """Recorded prompts that have answers at every one of `budgets`; `prefill_ms` a prompt token, where recorded."""

    prompts: Sequence[Prompt]
    budgets: Sequence[int]
    prefill_ms: float | None = None

    @classmethod
    def of(cls, records: Sequence[Record], method: str, temperature: float | None = None) -> Acceptance:
        """What records tell of a method. Raises `InvalidRequest` where they do not tell enough, or of several things.

        `temperature` picks among several.
        """
        of_method = [r for r in records if r.method == method and r.accepted is not None and r.budget]
        fitting = [r for r in of_method if temperature is None or r.temperature == temperature]
        for name in ("model", "temperature", "variant", "run"):
            found = sorted({str(getattr(record, name)) for record in fitting})
            if len(found) > 1:
                raise InvalidRequest(
                    f"the records have several values of {name} ({', '.join(found)}); keep one of them"
                )
        heats = sorted({f"{r.temperature:g}" for r in of_method})
        if not fitting and heats:
            raise InvalidRequest(f"method {method} was recorded at temperature {', '.join(heats)}; name one of these")
        if not fitting:
            known = ", ".join(sorted({r.method for r in records if r.accepted is not None and r.budget}))
            raise InvalidRequest(
                f"no records of trees by method {method} with accepted lists; there are {known or 'none'} (--method)"
            )
        groups: dict[tuple[str, int, int], dict[int, Record]] = {}
        for record in fitting:
            groups.setdefault((record.dataset, record.sample, record.turn), {})[record.budget or 0] = record
        budgets = sorted({budget for group in groups.values() for budget in group})
        idle = next((r for r in fitting if not all(r.accepted or (1,))), None)
        if idle is not None:
            raise InvalidRequest(
                f"a record of {idle.dataset}, sample {idle.sample}, accepted 0 tokens in a round; at least 1 has to be"
            )
        prompts = []
        for group in groups.values():
            if len(group) == len(budgets):
                one = group[budgets[-1]]
                lists = {budget: list(record.accepted or ()) or [1] for budget, record in group.items()}
                prompts.append(Prompt(one.extra.get("prompt_tokens"), one.new_tokens, {0: [1], **lists}))
        if not prompts:
            raise InvalidRequest("no prompt was recorded at every budget; finish the run, or give fewer records")
        timed = [r for r in fitting if r.prefill_s and r.extra.get("prompt_tokens")]
        tokens = sum(r.extra["prompt_tokens"] for r in timed)
        prefill_ms = 1000 * sum(r.prefill_s or 0 for r in timed) / tokens if tokens else None
        return cls(prompts, [0, *budgets], prefill_ms)

    @cached_property
    def _taus(self) -> list[float]:
        pooled = ([n for prompt in self.prompts for n in prompt.accepted[budget]] for budget in self.budgets)
        return [sum(lengths) / len(lengths) for lengths in pooled]

    def tau(self, nodes: float) -> float:
        """Tokens a round with trees of that many nodes: the mean over all recorded rounds, linear in between."""
        return float(np.interp(nodes, self.budgets, self._taus))


@dataclass(frozen=True)
class Load:
    """What clients do: `rate` requests a second come at random times, or `clients` ask one after another.

    `prompt` and `answer` are the least and most tokens, evenly drawn; None: as recorded.
    """

    rate: float | None = None
    clients: int | None = None
    requests: int = 300
    prompt: tuple[int, int] | None = None
    answer: tuple[int, int] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.clients is None):
            raise InvalidRequest("a rate of arrivals or a number of clients is expected, and not both")
        for name, value in (("rate", self.rate), ("clients", self.clients), ("requests", self.requests)):
            if value is not None and not 0 < value < float("inf"):
                raise InvalidRequest(f"{name} is {value}; a positive number is expected")
        for name, span in (("prompt", self.prompt), ("answer", self.answer)):
            if span is not None and not 1 <= span[0] <= span[1] <= MOST_TOKENS:
                raise InvalidRequest(
                    f"{name} is {span[0]}-{span[1]}; two lengths from 1 to {MOST_TOKENS}, LEAST-MOST, are expected"
                )


@dataclass(frozen=True)
class Fleet:
    """The machines: `replicas` of `max_batch` slots each; trees of up to `budget` nodes, 0 for plain decoding.

    Sequences of one round share `max_rows` rows; None: as many as the profile says make the most of the time.
    """

    costs: CostModel
    acceptance: Acceptance
    budget: int
    replicas: int = 1
    max_batch: int = 8
    max_rows: int | None = None
    _rounds: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, value in (("replicas", self.replicas), ("max_batch", self.max_batch), ("max_rows", self.max_rows)):
            if value is not None and value < 1:
                raise InvalidRequest(f"{name} is {value}; at least 1 is expected")
        if self.budget not in self.acceptance.budgets:
            known = ", ".join(map(str, self.acceptance.budgets))
            raise InvalidRequest(f"nothing was recorded at budget {self.budget}; one of {known} is expected")

    def round(self, sequences: int, context: float) -> tuple[float, float]:
        """Nodes of each sequence's tree and milliseconds of a round."""
        key = sequences, int(context / _CONTEXT_STEP + 0.5) * _CONTEXT_STEP
        if key not in self._rounds:
            nodes = self._share(*key)
            ms, plain = self._ms(sequences, nodes, key[1]), self.costs.plain(key[1], sequences)
            pays = self.acceptance.tau(nodes) * plain >= ms
            drafts_anyway = sequences == 1 or self.max_rows is not None or not self.budget
            self._rounds[key] = (nodes, ms) if pays or drafts_anyway else (0, plain)
        return self._rounds[key]

    def prefill_ms(self, tokens: int, context: int) -> float:
        """Milliseconds of one chunk of a prompt: as recorded, else what verifying as many rows costs."""
        if self.acceptance.prefill_ms is not None:
            return self.acceptance.prefill_ms * tokens
        return float(self.costs.verify(tokens, context)[-1])

    def _share(self, sequences: int, context: int) -> float:
        """Nodes a sequence is left with."""
        if sequences == 1 or self.budget == 0:
            return self.budget
        if self.max_rows is not None:
            return min(self.budget, max(0, self.max_rows - sequences) / sequences)
        tau, ms = self.acceptance.tau, self._ms
        return max(range(self.budget + 1), key=lambda nodes: tau(nodes) / ms(sequences, nodes, context))

    def _ms(self, sequences: int, nodes: float, context: int) -> float:
        costs, rows = self.costs, max(1, round(sequences * (1 + nodes)))
        verify = float(costs.verify(max(rows, sequences), context, sequences)[-1])
        if not self.budget:  # what is left of a round is the drafter's
            return verify
        drafting = costs.draft(context, sequences, self.budget) + sequences * costs.rest_ms
        return verify + drafting + costs.build(sequences * self.budget)


@dataclass(frozen=True)
class Outcome:
    """What a simulated fleet did. Times are seconds, one entry a request in order of arrival."""

    budget: int
    load: Load
    replicas: int
    seconds: float
    first_token: Sequence[float]
    finished: Sequence[float]
    tokens: Sequence[int]
    prompt_tokens: Sequence[int]
    busy: float
    """Fraction of the replicas' time spent in steps."""
    batch: float
    """Mean sequences of a round."""
    nodes: float
    """Mean nodes of a tree."""
    tau: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of the whole fleet, from the first arrival to the last answer's end."""
        return sum(self.tokens) / self.seconds

    @property
    def token_times(self) -> list[float]:
        """Seconds between tokens after the first, a request's mean; requests of one token have none."""
        each = zip(self.finished, self.first_token, self.tokens, strict=True)
        return [(end - first) / (tokens - 1) for end, first, tokens in each if tokens > 1]

    def cost(self, price: float) -> float:
        """Of a million tokens, for a price of a replica's hour."""
        return price * self.replicas * self.seconds / 3600 / sum(self.tokens) * 1e6

    def summary(self, price: float | None = None) -> dict[str, Any]:
        """The figures of a table: times in seconds, percentiles over requests."""
        first, between = np.array(self.first_token), np.array(self.token_times or [0.0])
        return {
            "budget": self.budget,
            "rate": self.load.rate,
            "clients": self.load.clients,
            "requests": len(self.tokens),
            "tokens": int(sum(self.tokens)),
            "seconds": self.seconds,
            "requests_per_s": len(self.tokens) / self.seconds,
            "tokens_per_s": self.tokens_per_s,
            "first_token_s": float(np.mean(first)),
            "first_token_p95_s": float(np.percentile(first, 95)),
            "per_token_s": float(np.mean(between)),
            "per_token_p95_s": float(np.percentile(between, 95)),
            "request_s": float(np.mean(self.finished)),
            "busy": self.busy,
            "batch": self.batch,
            "nodes": self.nodes,
            "tau": self.tau,
            "cost_per_million": None if price is None else self.cost(price),
        }


def simulate(fleet: Fleet, load: Load) -> Outcome:
    """Serves the load; the same arguments give the same outcome.

    Prompts, lengths and the order of arrivals depend on the load's seed alone, so fleets can be compared.
    """
    environment = simpy.Environment()
    jobs = _jobs(environment, fleet.acceptance, load)
    replicas = [_Replica(environment, fleet, np.random.default_rng([load.seed, i])) for i in range(fleet.replicas)]

    def submit(job: _Job) -> None:
        job.arrived = environment.now
        min(replicas, key=lambda replica: replica.open).take(job)

    def arrivals(rate: float) -> Generator[simpy.Event, Any, None]:
        for job, gap in zip(jobs, _gaps(load), strict=True):
            yield environment.timeout(gap / rate)
            submit(job)

    def client(rest: Iterator[_Job]) -> Generator[simpy.Event, Any, None]:
        for job in rest:
            submit(job)
            yield job.done

    if load.rate is not None:
        environment.process(arrivals(load.rate))
    else:
        rest = iter(jobs)
        for _ in range(load.clients or 0):
            environment.process(client(rest))
    environment.run(simpy.AllOf(environment, [job.done for job in jobs]))
    begin, rounds = min(job.arrived for job in jobs), sum(replica.rounds for replica in replicas)
    seconds = environment.now - begin
    sequences = max(1, sum(replica.sequences for replica in replicas))
    return Outcome(
        budget=fleet.budget,
        load=load,
        replicas=fleet.replicas,
        seconds=seconds,
        first_token=[job.first_token - job.arrived for job in jobs],
        finished=[job.finished - job.arrived for job in jobs],
        tokens=[job.tokens for job in jobs],
        prompt_tokens=[job.encoded for job in jobs],
        busy=sum(replica.busy_s for replica in replicas) / (seconds * fleet.replicas),
        batch=sequences / max(1, rounds),
        nodes=sum(replica.nodes for replica in replicas) / sequences,
        tau=(sum(job.tokens - 1 for job in jobs)) / sequences,
    )


@dataclass(eq=False)
class _Job:
    """A request on its way; times are the simulation's, seconds."""

    recorded: Prompt
    prompt: int
    answer: int
    done: simpy.Event
    arrived: float = 0.0
    first_token: float = -1.0
    finished: float = -1.0
    encoded: int = 0
    tokens: int = 0
    rounds: int = 0


class _Replica:
    """One engine."""

    def __init__(self, environment: simpy.Environment, fleet: Fleet, rng: np.random.Generator) -> None:
        self._environment, self._fleet, self._rng = environment, fleet, rng
        self._waiting: deque[_Job] = deque()
        self._prefilling: list[_Job] = []
        self._decoding: list[_Job] = []
        self._wake = environment.event()
        self.busy_s = self.nodes = 0.0
        self.rounds = self.sequences = 0
        environment.process(self._run())

    @property
    def open(self) -> int:
        """Requests that wait or run here."""
        return len(self._waiting) + len(self._prefilling) + len(self._decoding)

    def take(self, job: _Job) -> None:
        """Queues a request."""
        self._waiting.append(job)
        if not self._wake.triggered:
            self._wake.succeed()

    def _run(self) -> Generator[simpy.Event, Any, None]:
        while True:
            if not self.open:
                self._wake = self._environment.event()
                yield self._wake
            seconds = (self._encode() + self._decode()) / 1000
            self.busy_s += seconds
            yield self._environment.timeout(seconds)
            self._report()

    def _encode(self) -> float:
        """Admits, and encodes a chunk of every prompt; milliseconds."""
        while self._waiting and len(self._prefilling) + len(self._decoding) < self._fleet.max_batch:
            self._prefilling.append(self._waiting.popleft())
        ms = 0.0
        for job in list(self._prefilling):
            chunk = min(PREFILL_CHUNK, job.prompt - job.encoded)
            ms += self._fleet.prefill_ms(chunk, job.encoded)
            job.encoded += chunk
            if job.encoded == job.prompt:
                job.tokens = 1
                self._prefilling.remove(job)
                self._decoding.append(job)
        return ms

    def _decode(self) -> float:
        """One round of all sequences that are not finished; milliseconds."""
        batch = [job for job in self._decoding if job.tokens < job.answer]
        if not batch:
            return 0.0
        context = sum(job.prompt + job.tokens for job in batch) / len(batch)
        nodes, ms = self._fleet.round(len(batch), context)
        for job in batch:
            job.tokens = min(job.answer, job.tokens + self._commits(job, nodes))
            job.rounds += 1
        self.rounds += 1
        self.sequences += len(batch)
        self.nodes += nodes * len(batch)
        return ms

    def _commits(self, job: _Job, nodes: float) -> int:
        """Tokens of a job's next round with a tree of `nodes`: recorded at the budget above or below, by chance."""
        budgets = self._fleet.acceptance.budgets
        above = int(np.searchsorted(budgets, nodes))
        budget = budgets[above]
        if budget != nodes:
            below = budgets[above - 1]
            budget = budget if self._rng.random() < (nodes - below) / (budget - below) else below
        recorded = job.recorded.accepted[budget]
        return recorded[job.rounds % len(recorded)]

    def _report(self) -> None:
        now = self._environment.now
        for job in list(self._decoding):
            if job.first_token < 0:
                job.first_token = now
            if job.tokens == job.answer:
                job.finished = now
                self._decoding.remove(job)
                job.done.succeed()


def _jobs(environment: simpy.Environment, acceptance: Acceptance, load: Load) -> list[_Job]:
    rng, jobs = np.random.default_rng([load.seed, 2**32]), []
    for _ in range(load.requests):
        recorded = acceptance.prompts[int(rng.integers(len(acceptance.prompts)))]
        places = rng.random(2)  # drawn in any case, so that one setting does not move the others
        if load.prompt is None and recorded.prompt_tokens is None:
            raise InvalidRequest("the records do not tell how long prompts are; give --prompt LEAST-MOST")
        prompt = recorded.prompt_tokens or 1 if load.prompt is None else _within(load.prompt, places[0])
        answer = max(1, recorded.new_tokens) if load.answer is None else _within(load.answer, places[1])
        jobs.append(_Job(recorded, prompt, answer, environment.event()))
    return jobs


def _gaps(load: Load) -> Sequence[float]:
    """Gaps between arrivals at one a second."""
    found: list[float] = np.random.default_rng([load.seed, 2**33]).exponential(size=load.requests).tolist()
    return found


def _within(span: tuple[int, int], place: float) -> int:
    return span[0] + int(place * (span[1] - span[0] + 1))
