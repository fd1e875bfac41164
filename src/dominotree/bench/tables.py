"""Tables of the report: exact CSV files for programs, and short tables for readers in Markdown and LaTeX."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from dominotree.bench.statistics import (
    GROUPS,
    Cell,
    Comparison,
    Configuration,
    Endings,
    Series,
    endings,
    scopes,
    stage_times,
    tree_sizes,
)

CELL_COLUMNS = (
    "run",
    "model",
    "temperature",
    "dataset",
    "method",
    "budget",
    "speedup",
    "tau",
    "tokens_per_s",
    "n",
)
PAIRWISE_COLUMNS = (
    "temperature",
    "scope",
    "a",
    "a_budget",
    "a_run",
    "b",
    "b_budget",
    "b_run",
    "n",
    "delta_pct",
    "ci_low",
    "ci_high",
)
VARIANT_COLUMNS = (*CELL_COLUMNS[:6], "variant", *CELL_COLUMNS[6:])
ABLATION_COLUMNS = (
    *("temperature", "scope", "a", "a_budget", "a_variant", "a_run"),
    *("b", "b_budget", "b_variant", "b_run", "n", "delta_pct", "ci_low", "ci_high"),
)

_TITLES = {
    "gsm8k": "GSM8K",
    "math500": "MATH-500",
    "aime25": "AIME25",
    "humaneval": "HumanEval",
    "mbpp": "MBPP",
    "livecodebench": "LCB",
    "mt-bench": "MT-Bench",
    "alpaca": "Alpaca",
    **{group: group.capitalize() for group in GROUPS},
}

DASH = "–"
NO_STAGES = "no record has stage_ms, the milliseconds per round"


def title_of(scope: str) -> str:
    """A data set's or group's name as people write it."""
    return _TITLES.get(scope, scope)


def cells_csv(cells: Iterable[Cell]) -> str:
    """`cells.csv`: every configuration without a variant, on each data set and group (`CELL_COLUMNS`)."""
    return _csv(CELL_COLUMNS, (_cell_row(c) for c in cells if c.configuration.variant is None))


def variants_csv(cells: Iterable[Cell]) -> str:
    """`variants.csv`: the cells of the ablation variants, with a column naming the variant."""
    rows = ((c, _cell_row(c)) for c in cells if c.configuration.variant is not None)
    return _csv(VARIANT_COLUMNS, ((*row[:6], c.configuration.variant, *row[6:]) for c, row in rows))


def pairwise_csv(comparisons: Iterable[Comparison]) -> str:
    """`pairwise.csv`: paired differences in percent with 95% intervals (`PAIRWISE_COLUMNS`)."""
    return _csv(PAIRWISE_COLUMNS, (_comparison_row(c, variants=False) for c in comparisons))


def ablations_csv(comparisons: Iterable[Comparison]) -> str:
    """`ablations.csv`: the same for pairs of ablation variants, with columns naming the variants."""
    return _csv(ABLATION_COLUMNS, (_comparison_row(c, variants=True) for c in comparisons))


def _cell_row(cell: Cell) -> tuple[object, ...]:
    method, budget, _ = cell.configuration
    where = (cell.run, cell.model, cell.temperature, cell.dataset, method, budget)
    return (*where, _number(cell.speedup), _number(cell.tau), _number(cell.tokens_per_s), cell.n)


def _comparison_row(c: Comparison, *, variants: bool) -> tuple[object, ...]:
    a, b = (one if variants else one[:2] for one in (c.a, c.b))
    numbers = (_number(value) for value in (c.delta_pct, c.ci_low, c.ci_high))
    return (c.temperature, c.scope, *a, c.a_run, *b, c.b_run, c.n, *numbers)


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.6f}"


def _csv(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()


class MissingData(Exception):
    """What a table or figure would need and the records do not have, in words for the reader."""


@dataclass(frozen=True)
class Table:
    """A table of short texts: `head` and `rows` are equally long, the first `labels` columns name the row.

    `strong` holds the (row, column) places to set in bold.
    """

    name: str
    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    labels: int = 1
    strong: frozenset[tuple[int, int]] = field(default_factory=frozenset)


def markdown(table: Table) -> str:
    """The table in GitHub's Markdown, its caption above it."""

    def line(texts: Iterable[str]) -> str:
        return "| " + " | ".join(texts) + " |\n"

    rule = ["---" if column < table.labels else "---:" for column in range(len(table.head))]
    body = _styled(table, lambda text: text.replace("|", "\\|"), "**{}**")
    return f"{table.caption}\n\n" + line(table.head) + line(rule) + "".join(map(line, body))


_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        **{char: "\\" + char for char in "&%$#_{}"},
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        DASH: "--",
        "−": "$-$",
        "†": r"\textdagger{}",
    }
)


def latex(table: Table) -> str:
    r"""The table as a `table` float; needs `\usepackage{booktabs}`, and graphicx to fit the text width."""

    def line(texts: Iterable[str]) -> str:
        return " & ".join(texts) + " \\\\\n"

    columns = "l" * table.labels + "r" * (len(table.head) - table.labels)
    head = line(text.translate(_LATEX) for text in table.head)
    body = "".join(map(line, _styled(table, lambda text: text.translate(_LATEX), r"\textbf{{{}}}")))
    return (
        f"\\begin{{table}}\n\\centering\n\\caption{{{table.caption.translate(_LATEX)}}}\n"
        f"\\label{{tab:{table.name}}}\n\\resizebox{{\\textwidth}}{{!}}{{%\n\\begin{{tabular}}{{{columns}}}\n"
        f"\\toprule\n{head}\\midrule\n{body}\\bottomrule\n\\end{{tabular}}}}\n\\end{{table}}\n"
    )


def _styled(table: Table, escape: Callable[[str], str], strong: str) -> list[list[str]]:
    return [
        [strong.format(escape(text)) if (i, j) in table.strong else escape(text) for j, text in enumerate(row)]
        for i, row in enumerate(table.rows)
    ]


def speed_table(cells: Sequence[Cell], name: str, where: str) -> Table:
    """Speedup / tau of the cells of one model and temperature: rows method@budget, columns sets and groups.

    The best speedup of a column is bold.
    """
    caption = f"Speedup over autoregressive decoding / mean accepted length (tau), {where}."
    return _cell_table(cells, name, caption, lambda c: f"{_fixed(c.speedup)}/{c.tau:.2f}", lambda c: c.speedup)


def throughput_table(cells: Sequence[Cell], name: str, where: str) -> Table:
    """Tokens/s of the cells of one model and temperature, laid out as `speed_table` without the bold."""
    caption = f"Tokens per second of decoding, {where}."
    return _cell_table(cells, name, caption, lambda c: f"{c.tokens_per_s:.1f}", lambda c: None)


def _cell_table(
    cells: Sequence[Cell],
    name: str,
    caption: str,
    text: Callable[[Cell], str],
    value: Callable[[Cell], float | None],
) -> Table:
    if not cells:
        raise MissingData("every configuration has a variant")
    columns = list(scopes(c.dataset for c in cells if c.dataset not in GROUPS))
    by_row: dict[tuple[Configuration, str], dict[str, Cell]] = {}
    for cell in cells:
        by_row.setdefault((cell.configuration, cell.run), {})[cell.dataset] = cell
    rows: list[list[str]] = []
    best: dict[int, tuple[float, int]] = {}
    for label, found in zip(row_labels(by_row), by_row.values(), strict=True):
        for j, scope in enumerate(columns, start=1):
            worth = value(found[scope]) if scope in found else None
            if worth is not None and len(by_row) > 1 and worth > best.get(j, (-1.0, 0))[0]:
                best[j] = (worth, len(rows))
        rows.append([label] + [text(found[scope]) if scope in found else DASH for scope in columns])
    strong = frozenset((i, j) for j, (_, i) in best.items())
    return Table(name, caption, ["method", *map(title_of, columns)], rows, 1, strong)


def row_labels(measured: Iterable[tuple[Configuration, str]]) -> list[str]:
    """A label for each (configuration, run), naming the run only of what was measured in several."""
    pairs = list(measured)
    times = Counter(configuration for configuration, _ in set(pairs))
    return [configuration.label + (f" [{run}]" if times[configuration] > 1 else "") for configuration, run in pairs]


def _fixed(value: float | None, digits: int = 2) -> str:
    return DASH if value is None else f"{value:.{digits}f}"


def pairwise_table(comparisons: Sequence[Comparison], name: str, where: str) -> Table:
    """Paired differences of one model and temperature: a row a pair, a column a scope, "+3.9 [2.0, 6.0]".

    Differences whose interval excludes zero are bold. Raises MissingData without a comparison.
    """
    if not comparisons:
        raise MissingData("no two configurations to compare share a prompt")
    sets_first = list(scopes(c.scope for c in comparisons if c.scope not in GROUPS))
    columns = sorted(sets_first, key=lambda scope: (scope != "overall", scope not in GROUPS))
    by_pair: dict[tuple[tuple[Configuration, str], tuple[Configuration, str]], dict[str, Comparison]] = {}
    for c in comparisons:
        by_pair.setdefault(((c.a, c.a_run), (c.b, c.b_run)), {})[c.scope] = c
    labels = row_labels(side for pair in by_pair for side in pair)
    rows: list[list[str]] = []
    strong: set[tuple[int, int]] = set()
    for ((_, a_run), (_, b_run)), found in by_pair.items():
        a, b = labels[2 * len(rows) : 2 * len(rows) + 2]
        strong |= {(len(rows), j) for j, s in enumerate(columns, 2) if s in found and _excludes_zero(found[s])}
        texts = [_delta(found[scope]) if scope in found else DASH for scope in columns]
        rows.append([a, b if a_run == b_run else f"{b} †", *texts])
    across = any(c.a_run != c.b_run for c in comparisons)
    caption = (
        f"a against b in percent, with the 95% interval of a paired bootstrap over prompts, {where}. "
        "Bold: the interval excludes zero." + (" †: another run, compared by speedup." if across else "")
    )
    return Table(name, caption, ["a", "b", *map(title_of, columns)], rows, 2, frozenset(strong))


def _delta(c: Comparison) -> str:
    interval = "" if c.ci_low is None else f" [{_signless(c.ci_low)}, {_signless(c.ci_high or 0.0)}]"
    return f"{c.delta_pct:+.1f}".replace("-", "−") + interval


def _signless(value: float) -> str:
    return f"{value:.1f}".replace("-", "−")


def _excludes_zero(c: Comparison) -> bool:
    return c.ci_low is not None and c.ci_high is not None and (c.ci_low > 0 or c.ci_high < 0)


def stage_table(series: Sequence[Series], name: str, where: str) -> Table:
    """Milliseconds per round by stage, one row a configuration, run and temperature.

    Raises MissingData where no record has `stage_ms`.
    """
    times = [(one, found) for one in series if (found := stage_times(one.records))]
    if not times:
        raise MissingData(NO_STAGES)
    stages = list(dict.fromkeys(stage for _, found in times for stage in found))
    rows = [
        [
            one.configuration.label,
            one.run,
            f"{one.temperature:g}",
            *(_fixed(found.get(stage)) for stage in stages),
            f"{sum(found.values()):.2f}",
        ]
        for one, found in times
    ]
    caption = f"Milliseconds per round, mean over prompts, {where}."
    return Table(name, caption, ["method", "run", "T", *stages, "round"], rows, 3)


def variant_table(cells: Sequence[Cell], name: str, where: str) -> Table:
    """The ablation variants of one model and temperature and what they vary, overall.

    Raises MissingData where no configuration has a variant.
    """
    overall = [c for c in cells if c.dataset == "overall"]
    varied = {(c.run, *c.configuration[:2]) for c in overall if c.configuration.variant is not None}
    rows = [
        [c.configuration.label, c.run, _fixed(c.speedup), f"{c.tau:.2f}", f"{c.tokens_per_s:.1f}", str(c.n)]
        for c in overall
        if (c.run, *c.configuration[:2]) in varied
    ]
    if not rows:
        raise MissingData("no record names a variant")
    head = ["method", "run", "speedup", "tau", "tokens/s", "n"]
    return Table(name, f"Ablation variants, overall, {where}.", head, rows, 2)


def tree_size_table(series: Sequence[Series], name: str, where: str) -> Table:
    """Sizes of the trees of the methods that set them.

    Raises MissingData where no record has a `cap`.
    """
    found = [(one, sizes) for one in series if (sizes := tree_sizes(one.records))]
    if not found:
        raise MissingData("no record has a cap")
    rows = [
        [
            *(one.configuration.label, one.run, f"{one.temperature:g}", str(sizes.rounds)),
            *(f"{sizes.mean:.1f}", f"{sizes.median:g}", f"{100 * sizes.capped:.1f}", f"{100 * sizes.empty:.1f}"),
        ]
        for one, sizes in found
    ]
    head = ["method", "run", "T", "rounds", "nodes, mean", "median", "at the cap, %", "without a tree, %"]
    return Table(name, f"Trees of the methods that set their size themselves, {where}.", head, rows, 3)


def endings_table(series: Sequence[Series], name: str, where: str) -> Table:
    """Share of answers that ended by themselves or were cut by length, and tau of each.

    Raises MissingData where no record has `finish_reason`.
    """
    found = [(one, how) for one in series if (how := endings(one.records))]
    if not found:
        raise MissingData("no record has finish_reason")

    def row(one: Series, how: Endings) -> list[str]:
        shares = [f"{100 * share:.1f}" for share in (how.stop_share, how.length_share)]
        labels = [one.configuration.label, one.run, f"{one.temperature:g}", str(how.n)]
        return [*labels, *shares, _fixed(how.stop_tau), _fixed(how.length_tau)]

    head = ["method", "run", "T", "n", "stopped, %", "cut by length, %", "tau, stopped", "tau, cut"]
    caption = f"Answers that ended by themselves and answers cut by the length limit, {where}."
    return Table(name, caption, head, [row(*pair) for pair in found], 3)
