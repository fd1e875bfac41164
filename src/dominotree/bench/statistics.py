"""What the records say: speedups, tau, paired differences with intervals, and where time and tokens go.

The definitions are those of the evaluation protocol of DominoTree (arXiv 2607.08642).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dominotree.bench.records import CalibrationBin, InvalidRecord, Record

GROUPS: dict[str, tuple[str, ...]] = {
    "math": ("gsm8k", "math500", "aime25"),
    "code": ("humaneval", "mbpp", "livecodebench"),
    "chat": ("mt-bench", "alpaca"),
}
GROUPS["overall"] = tuple(name for names in GROUPS.values() for name in names)

METHOD_ORDER = (
    "ar",
    "lookup",
    "dflash",
    "ddtree",
    "caddtree",
    "domino",
    "marginal",
    "static",
    "condadaptive",
    "dominotree",
    "lookuptree",
)

MOST_PAIRS = 120

Floats = NDArray[np.float64]
Prompt = tuple[int, int]


class Configuration(NamedTuple):
    """A method at a budget, and the ablation it belongs to, if any."""

    method: str
    budget: int | None = None
    variant: str | None = None

    @property
    def label(self) -> str:
        """`method@budget (variant)`, as the tables show it."""
        budget = "" if self.budget is None else f"@{self.budget}"
        return self.method + budget + (f" ({self.variant})" if self.variant else "")

    @property
    def rank(self) -> tuple[int, str, int, str]:
        """Sorting key: the published order of methods, unknown methods last, then budget, then variant."""
        known = self.method in METHOD_ORDER
        place = METHOD_ORDER.index(self.method) if known else len(METHOD_ORDER)
        return place, self.method, -1 if self.budget is None else self.budget, self.variant or ""


@dataclass(frozen=True, eq=False)
class Series:
    """All records of one configuration in one run, for one model and temperature.

    `sets` maps a data set to its records by (sample, turn); `ar` is the autoregressive series that speedups
    are taken against: of the same run, model, temperature and, where there is one, variant. For an
    autoregressive series it is the series itself; None where the run has none.
    """

    run: str
    model: str
    temperature: float
    configuration: Configuration
    sets: Mapping[str, Mapping[Prompt, Record]]
    baseline: Series | None = None

    @property
    def ar(self) -> Series | None:
        return self if self.configuration.method == "ar" else self.baseline

    @property
    def records(self) -> Iterator[Record]:
        return (record for prompts in self.sets.values() for record in prompts.values())


def collect(records: Iterable[Record]) -> list[Series]:
    """Sort records into series, ordered by model, temperature, configuration and run.

    Raises InvalidRecord for a data set named like a group average.
    """
    grouped: dict[tuple[str, str, float, Configuration], dict[str, dict[Prompt, Record]]] = {}
    for record in records:
        if record.dataset in GROUPS:
            raise InvalidRecord(
                f"run '{record.run}' has a data set named '{record.dataset}', the name of a group average: "
                "rename the data set"
            )
        configuration = Configuration(record.method, record.budget, record.variant)
        sets = grouped.setdefault((record.run, record.model, record.temperature, configuration), {})
        sets.setdefault(record.dataset, {})[record.sample, record.turn] = record
    plain = {key: Series(*key, sets) for key, sets in grouped.items()}
    baselines = {
        (run, model, temperature, configuration.variant): series
        for (run, model, temperature, configuration), series in plain.items()
        if configuration.method == "ar"
    }
    series = []
    for (run, model, temperature, configuration), one in plain.items():
        where = (run, model, temperature)
        baseline = baselines.get((*where, configuration.variant)) or baselines.get((*where, None))
        is_ar = configuration.method == "ar"
        series.append(one if is_ar else Series(*where, configuration, one.sets, baseline))
    return sorted(series, key=lambda s: (s.model, s.temperature, s.configuration.rank, s.run))


def scopes(measured: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """What a table over these data sets shows: each set, then the groups with the sets they average.

    Known sets come first, in published order. A group holds those of its sets that were measured, and is
    left out where none was; `overall` covers every measured set where none of the eight published ones is.
    """
    names = set(measured)
    known = [name for name in GROUPS["overall"] if name in names]
    ordered = known + sorted(names.difference(known))
    rows: dict[str, tuple[str, ...]] = {name: (name,) for name in ordered}
    for group, members in GROUPS.items():
        if present := tuple(name for name in members if name in names):
            rows[group] = present
    if not known:
        rows["overall"] = tuple(ordered)
    return rows


@dataclass(frozen=True)
class Cell:
    """One row of `cells.csv`: a configuration on a data set, or the plain mean over the sets of a group.

    `speedup` = mean tokens/s over prompts / mean tokens/s of `ar` in the same run and temperature (None
    without one); `tau` = mean of `mean_accepted` over prompts; `n` = prompts.
    """

    run: str
    model: str
    temperature: float
    dataset: str
    configuration: Configuration
    speedup: float | None
    tau: float
    tokens_per_s: float
    n: int


def cells(series: Iterable[Series]) -> list[Cell]:
    """The cells of every series: its data sets, then the averages of the groups they belong to."""
    return [cell for one in series for cell in _cells_of(one)]


def _cells_of(series: Series) -> Iterator[Cell]:
    own: dict[str, Cell] = {}
    for scope, members in scopes(series.sets).items():
        if members == (scope,):
            speed, tau = _means(series, scope)
            ar = series.ar
            ar_speed = _means(ar, scope)[0] if ar and scope in ar.sets else 0.0
            speedup = speed / ar_speed if ar_speed else None
            n = len(series.sets[scope])
        else:
            parts = [own[name] for name in members]
            speedups = [part.speedup for part in parts if part.speedup is not None]
            speedup = float(np.mean(speedups)) if len(speedups) == len(parts) else None
            speed = float(np.mean([part.tokens_per_s for part in parts]))
            tau = float(np.mean([part.tau for part in parts]))
            n = sum(part.n for part in parts)
        own[scope] = Cell(
            series.run,
            series.model,
            series.temperature,
            scope,
            series.configuration,
            speedup,
            tau,
            speed,
            n,
        )
    yield from own.values()


def _means(series: Series, dataset: str) -> tuple[float, float]:
    """Mean tokens/s and mean tau over the prompts of a set."""
    prompts = series.sets[dataset].values()
    return (
        float(np.mean([record.tokens_per_s for record in prompts])),
        float(np.mean([record.mean_accepted for record in prompts])),
    )


@dataclass(frozen=True)
class Comparison:
    """`a` against `b` on paired prompts: delta in percent, with the bounds of its 95% interval.

    The bounds are None for a single prompt, which has no spread to resample.
    """

    model: str
    temperature: float
    scope: str
    a: Configuration
    a_run: str
    b: Configuration
    b_run: str
    n: int
    delta_pct: float
    ci_low: float | None
    ci_high: float | None


def default_pairs(series: Sequence[Series]) -> list[tuple[Series, Series]]:
    """The pairs (a, b) that a report compares by itself, within a model and a temperature, variants left out.

    Every pair of configurations, the later one in `METHOD_ORDER` (or the larger budget) as `a`, so that
    `dominotree` is compared against the others; `ar` is compared within its own run only, since a speedup
    over another run's `ar` is the speedup itself. Beyond `MOST_PAIRS` (16 configurations) the list is cut to
    pairs of the same run at the same budget (methods without a budget count as being at every one), and the
    best budget of each method in each run (by mean tokens/s) against the best of the others.
    """
    groups: dict[tuple[str, float], list[Series]] = defaultdict(list)
    for one in series:
        if one.configuration.variant is None:
            groups[one.model, one.temperature].append(one)
    pairs: list[tuple[Series, Series]] = []
    for members in groups.values():
        ordered = sorted(members, key=lambda s: (s.configuration.rank, s.run))
        found = [(a, b) for b, a in combinations(ordered, 2) if _comparable(a, b)]
        if len(found) > MOST_PAIRS:
            best = set(best_budgets(ordered))
            found = [(a, b) for a, b in found if _same_budget(a, b) or (a in best and b in best)]
        pairs += found
    return pairs


def ablation_pairs(series: Sequence[Series]) -> list[tuple[Series, Series]]:
    """Pairs (a, b) of one run that differ by their variant only, or by their method only within a variant.

    A variant is compared against the configuration without one where the run has it, else against the other
    variants.
    """
    by_budget: dict[tuple[str, str, float, int | None], list[Series]] = defaultdict(list)
    for one in series:
        by_budget[one.run, one.model, one.temperature, one.configuration.budget].append(one)
    pairs = []
    for members in by_budget.values():
        plain = {s.configuration.method for s in members if s.configuration.variant is None}
        for b, a in combinations(sorted(members, key=lambda s: s.configuration.rank), 2):
            if a.configuration.variant is None and b.configuration.variant is None:
                continue
            same_method = a.configuration.method == b.configuration.method
            same_variant = a.configuration.variant == b.configuration.variant
            only_variants = a.configuration.variant is not None and b.configuration.variant is not None
            if same_variant or (same_method and not (only_variants and a.configuration.method in plain)):
                pairs.append((a, b))
    return pairs


def _comparable(a: Series, b: Series) -> bool:
    return a.run == b.run or "ar" not in (a.configuration.method, b.configuration.method)


def _same_budget(a: Series, b: Series) -> bool:
    budgets = {a.configuration.budget, b.configuration.budget} - {None}
    return a.run == b.run and len(budgets) <= 1


def best_budgets(series: Iterable[Series]) -> list[Series]:
    """Of each method in each run the series with the most tokens/s over its prompts, in the order given.

    Meant for the series of one model and temperature, without variants.
    """
    best: dict[tuple[str, str], tuple[float, Series]] = {}
    for one in series:
        speed = float(np.mean([record.tokens_per_s for record in one.records]))
        key = (one.run, one.configuration.method)
        if key not in best or speed > best[key][0]:
            best[key] = (speed, one)
    return [one for _, one in best.values()]


def paired_speeds(a: Series, b: Series, datasets: Iterable[str]) -> tuple[Floats, Floats]:
    """Speeds of two series on the prompts both have, pooled over the data sets: two arrays `[n]`.

    Prompts are paired by data set, sample and turn. Within one run the speeds are tokens/s. Across runs,
    whose machines and harnesses may differ, each prompt's speed is its speedup over its own run's `ar` on
    that same prompt, so a prompt also has to be among both `ar` records (with a speed above 0).
    """
    speeds: list[tuple[float, float]] = []
    for name in datasets:
        of_a, of_b = a.sets.get(name, {}), b.sets.get(name, {})
        shared = sorted(of_a.keys() & of_b.keys())
        if a.run == b.run:
            speeds += [(of_a[p].tokens_per_s, of_b[p].tokens_per_s) for p in shared]
            continue
        ar_a, ar_b = (one.ar.sets.get(name, {}) if one.ar else {} for one in (a, b))
        for p in shared:
            if p in ar_a and p in ar_b and ar_a[p].tokens_per_s and ar_b[p].tokens_per_s:
                speeds.append(
                    (of_a[p].tokens_per_s / ar_a[p].tokens_per_s, of_b[p].tokens_per_s / ar_b[p].tokens_per_s)
                )
    columns = np.array(speeds, dtype=np.float64).reshape(-1, 2)
    return columns[:, 0], columns[:, 1]


def compare(pairs: Iterable[tuple[Series, Series]], *, resamples: int = 10_000, seed: int = 0) -> list[Comparison]:
    """Compare each pair on every data set both were measured on and on the groups of those sets.

    delta = 100 * (mean(a) / mean(b) - 1) over paired prompts (see `paired_speeds`); group rows pool the
    prompts of their sets. The 95% interval is the 2.5 and 97.5 percentile of that delta over `resamples`
    resamples of the prompts. A scope without a paired prompt, or where `b` made no tokens, has no row.
    """
    rows: list[tuple[Series, Series, str]] = []
    samples: list[tuple[Floats, Floats]] = []
    for a, b in pairs:
        for scope, datasets in scopes(a.sets.keys() & b.sets.keys()).items():
            x, y = paired_speeds(a, b, datasets)
            if len(x) and y.mean() > 0:
                rows.append((a, b, scope))
                samples.append((x, y))
    intervals = bootstrap_intervals(samples, resamples=resamples, seed=seed)
    return [
        Comparison(
            a.model,
            a.temperature,
            scope,
            a.configuration,
            a.run,
            b.configuration,
            b.run,
            len(x),
            float(100 * (x.mean() / y.mean() - 1)),
            low,
            high,
        )
        for (a, b, scope), (x, y), (low, high) in zip(rows, samples, intervals, strict=True)
    ]


def bootstrap_intervals(
    samples: Sequence[tuple[Floats, Floats]], *, resamples: int = 10_000, seed: int = 0
) -> list[tuple[float | None, float | None]]:
    """95% percentile intervals of 100 * (mean(x) / mean(y) - 1) for pairs of arrays `[n]`, in order.

    Pairs with as many prompts share one set of resamples, drawn from (seed, n) alone, so that an interval
    does not depend on what else is compared. Pairs with fewer than two prompts give (None, None).
    """
    by_size: dict[int, list[int]] = defaultdict(list)
    for index, (x, _) in enumerate(samples):
        by_size[len(x)].append(index)
    intervals: list[tuple[float | None, float | None]] = [(None, None)] * len(samples)
    for n, indices in by_size.items():
        if n < 2:
            continue
        x = np.stack([samples[i][0] for i in indices], axis=1)  # [n, pairs]
        y = np.stack([samples[i][1] for i in indices], axis=1)
        ratios = np.concatenate([_ratio(counts, x, y) for counts in _resample_counts(n, resamples, seed)])
        low, high = np.percentile(100 * (ratios - 1), [2.5, 97.5], axis=0)
        for place, i in enumerate(indices):
            intervals[i] = (float(low[place]), float(high[place]))
    return intervals


def _ratio(counts: Floats, x: Floats, y: Floats) -> Floats:
    below: Floats = counts @ y
    above: Floats = counts @ x
    return np.divide(above, below, out=np.ones_like(below), where=below > 0)


def _resample_counts(n: int, resamples: int, seed: int, chunk: int = 1000) -> Iterator[Floats]:
    """How often each of n prompts is drawn in each resample: chunks `[<= chunk, n]`, rows summing to n."""
    rng = np.random.default_rng([seed, n])
    for start in range(0, resamples, chunk):
        rows = min(chunk, resamples - start)
        drawn = rng.integers(0, n, size=(rows, n)) + n * np.arange(rows)[:, None]
        yield np.bincount(drawn.ravel(), minlength=rows * n).reshape(rows, n).astype(np.float64)


def acceptance_by_depth(records: Iterable[Record]) -> Floats:
    """Share of rounds in which the draft token at depth d was accepted: `[deepest accepted + 1]`, falling.

    A round that committed c tokens accepted depths 0 .. c-2. Pooled over the rounds of all records that have
    `accepted`; empty where none has. The last round of an answer is counted as cut by its stop.
    """
    committed = [count for record in records for count in record.accepted or ()]
    if not committed or max(committed) < 2:
        return np.zeros(0)
    counts = np.array(committed)
    shares: Floats = (counts[:, None] > np.arange(1, counts.max())).mean(axis=0)
    return shares


def stage_times(records: Iterable[Record]) -> dict[str, float]:
    """Milliseconds per round by stage: the mean over prompts of `stage_ms`; empty where no record has it."""
    found = [record.stage_ms for record in records if record.stage_ms]
    stages = dict.fromkeys(stage for times in found for stage in times)
    return {stage: sum(times.get(stage, 0.0) for times in found) / len(found) for stage in stages}


def budget_curves(cells: Iterable[Cell]) -> dict[tuple[str, str, float, str], list[Cell]]:
    """`overall` cells by rising budget, keyed by (run, model, temperature, method); two budgets or more."""
    curves: dict[tuple[str, str, float, str], list[Cell]] = defaultdict(list)
    for cell in cells:
        method, budget, variant = cell.configuration
        if cell.dataset == "overall" and budget is not None and variant is None:
            curves[cell.run, cell.model, cell.temperature, method].append(cell)
    return {
        key: sorted(curve, key=lambda cell: cell.configuration.rank) for key, curve in curves.items() if len(curve) > 1
    }


def width_curves(cells: Iterable[Cell]) -> dict[tuple[str, str, float, str], list[tuple[int, Cell]]]:
    """`overall` cells of the variants "M=<width>" by rising width, keyed by (run, model, temperature, label).

    A width of 0 means the whole vocabulary and comes last. Only configurations with two widths or more.
    """
    curves: dict[tuple[str, str, float, str], list[tuple[int, Cell]]] = defaultdict(list)
    for cell in cells:
        method, budget, variant = cell.configuration
        name, _, width = (variant or "").partition("=")
        if cell.dataset == "overall" and name == "M" and width.isdecimal():
            label = Configuration(method, budget).label
            curves[cell.run, cell.model, cell.temperature, label].append((int(width), cell))
    return {
        key: sorted(curve, key=lambda point: point[0] or 1 << 62) for key, curve in curves.items() if len(curve) > 1
    }


@dataclass(frozen=True)
class Endings:
    """How answers ended: by themselves ("stop") or cut by the length limit ("length"), and tau of each apart.

    Shares are of the `n` answers that say how they ended, other reasons making up the rest; a tau is None
    where there was no such answer.
    """

    n: int
    stop_share: float
    length_share: float
    stop_tau: float | None
    length_tau: float | None


def endings(records: Iterable[Record]) -> Endings | None:
    """How the answers ended; None where no record has `finish_reason`."""
    taus: dict[str, list[float]] = defaultdict(list)
    for record in records:
        if record.finish_reason:
            taus[record.finish_reason].append(record.mean_accepted)
    n = sum(map(len, taus.values()))
    if not n:
        return None

    def tau(reason: str) -> float | None:
        return float(np.mean(taus[reason])) if reason in taus else None

    return Endings(n, len(taus.get("stop", ())) / n, len(taus.get("length", ())) / n, tau("stop"), tau("length"))


class TreeSizes(NamedTuple):
    """How large the trees were that a method verified which sets their size itself, over `rounds` rounds.

    `capped` is the share of rounds at the cap, `empty` of those without a tree.
    """

    rounds: int
    mean: float
    median: float
    capped: float
    empty: float


def tree_sizes(records: Iterable[Record]) -> TreeSizes | None:
    """The sizes of the trees of records with a `cap`; None where none has one."""
    pairs = [(n, record.cap) for record in records if record.cap is not None for n in record.nodes or ()]
    if not pairs:
        return None
    sizes, caps = np.array(pairs).T
    capped, empty = float(np.mean(sizes >= caps)), float(np.mean(sizes == 0))
    return TreeSizes(len(pairs), float(sizes.mean()), float(np.median(sizes)), capped, empty)


def reliability(bins: Iterable[CalibrationBin], edges: int = 10) -> dict[str, list[CalibrationBin]]:
    """Calibration curves pooled over depths: per label, bins of equal width by predicted probability.

    Means are weighted by the number of nodes; the depth of a pooled bin is the smallest that fell into it.
    """
    pooled: dict[tuple[str, int], list[CalibrationBin]] = defaultdict(list)
    for one in bins:
        pooled[one.label, min(int(one.mean_predicted * edges), edges - 1)].append(one)
    curves: dict[str, list[CalibrationBin]] = defaultdict(list)
    for (label, _), members in sorted(pooled.items()):
        n = sum(one.n for one in members)
        predicted = sum(one.n * one.mean_predicted for one in members) / n
        accepted = sum(one.n * one.accepted_rate for one in members) / n
        curves[label].append(CalibrationBin(label, min(one.depth for one in members), n, predicted, accepted))
    return dict(curves)


def calibration_error(bins: Sequence[CalibrationBin]) -> float:
    """Expected calibration error: mean of |predicted - accepted| over bins, weighted by their nodes."""
    total = sum(one.n for one in bins)
    return sum(one.n * abs(one.mean_predicted - one.accepted_rate) for one in bins) / total


def notes(series: Sequence[Series]) -> list[str]:
    """What a reader has to know before trusting a table: missing baselines, differing prompts."""
    lines = []
    without: dict[str, dict[str, None]] = defaultdict(dict)
    for one in series:
        missing = [name for name in one.sets if not one.ar or name not in one.ar.sets]
        if missing:
            sets = "" if one.ar is None else f" on {', '.join(missing)}"
            without[one.run][f"T={one.temperature:g}{sets}"] = None
    for run, places in without.items():
        lines.append(
            f"Run '{run}' has no `ar` records at {'; '.join(places)}: speedups there are blank, "
            "and its tokens/s are compared within the run only. Run the method `ar` as well to have them."
        )
    for run in dict.fromkeys(one.run for one in series):
        counts: dict[str, int] = defaultdict(int)
        prompts: dict[tuple[str, float], set[frozenset[tuple[str, Prompt]]]] = defaultdict(set)
        for one in series:
            if one.run == run:
                measured = frozenset((name, prompt) for name, records in one.sets.items() for prompt in records)
                prompts[one.model, one.temperature].add(measured)
                counts[one.configuration.label] += len(measured)
        if any(len(different) > 1 for different in prompts.values()):
            listed = ", ".join(f"{label} {count}" for label, count in counts.items())
            lines.append(
                f"In run '{run}' the configurations were not all measured on the same prompts ({listed} "
                "records), so their averages differ for that too; paired differences use shared prompts only."
            )
    return lines
