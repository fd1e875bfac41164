"""Tables of the report: exact CSV files for programs, and short tables for readers in Markdown and LaTeX."""

from __future__ import annotations

import csv
import io
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
        [
            strong.format(escape(text)) if (i, j) in table.strong else escape(text)
            for j, text in enumerate(row)
        ]
        for i, row in enumerate(table.rows)
    ]


def speed_table(cells: Sequence[Cell], name: str, where: str) -> Table:
    """Speedup / tau of the cells of one model and temperature: rows method@budget, columns sets and groups.

    The best speedup of a column is bold.
    """
    caption = f"Speedup over autoregressive decoding / mean accepted length (tau), {where}."
    return _cell_table(
        cells, name, caption, lambda c: f"{_fixed(c.speedup)} / {c.tau:.2f}", lambda c: c.speedup
    )


def throughput_table(cells: Sequence[Cell], name: str, where: str) -> Table:
    """Tokens/s of the cells of one model and temperature, laid out as `speed_table`."""
    caption = f"Tokens per second of decoding, {where}."
    return _cell_table(cells, name, caption, lambda c: f"{c.tokens_per_s:.1f}", lambda c: c.tokens_per_s)


def _cell_table(
    cells: Sequence[Cell],
    name: str,
    caption: str,
    text: Callable[[Cell], str],
    value: Callable[[Cell], float | None],
) -> Table:
    columns = list(scopes(c.dataset for c in cells if c.dataset not in GROUPS))
    by_row: dict[tuple[Configuration, str], dict[str, Cell]] = {}
    for cell in cells:
        by_row.setdefault((cell.configuration, cell.run), {})[cell.dataset] = cell
    several_runs = len({run for _, run in by_row}) > 1
    head = ["method", *(["run"] if several_runs else []), *map(title_of, columns)]
    rows: list[list[str]] = []
    best: dict[int, tuple[float, int]] = {}
    for (configuration, run), found in by_row.items():
        labels = [configuration.label, *([run] if several_runs else [])]
        for j, scope in enumerate(columns, start=len(labels)):
            worth = value(found[scope]) if scope in found else None
            if worth is not None and len(by_row) > 1 and worth > best.get(j, (-1.0, 0))[0]:
                best[j] = (worth, len(rows))
        rows.append(labels + [text(found[scope]) if scope in found else DASH for scope in columns])
    strong = frozenset((i, j) for j, (_, i) in best.items())
    return Table(name, caption, head, rows, len(head) - len(columns), strong)


def _fixed(value: float | None, digits: int = 2) -> str:
    return DASH if value is None else f"{value:.{digits}f}"


def pairwise_table(comparisons: Sequence[Comparison], name: str, where: str) -> Table:
    """Paired differences of one model and temperature: a row a pair, a column a scope, "+3.9 [2.0, 6.0]".

    Differences whose interval excludes zero are bold.
    """
    columns = list(scopes(c.scope for c in comparisons if c.scope not in GROUPS))
    by_pair: dict[tuple[str, str], dict[str, Comparison]] = {}
    several_runs = len({run for c in comparisons for run in (c.a_run, c.b_run)}) > 1
    for c in comparisons:
        runs = (f" [{c.a_run}]", f" [{c.b_run}]") if several_runs else ("", "")
        by_pair.setdefault((c.a.label + runs[0], c.b.label + runs[1]), {})[c.scope] = c
    rows = [
        [a, b, *(_delta(found[scope]) if scope in found else DASH for scope in columns)]
        for (a, b), found in by_pair.items()
    ]
    strong = frozenset(
        (i, j)
        for i, found in enumerate(by_pair.values())
        for j, scope in enumerate(columns, start=2)
        if scope in found and _excludes_zero(found[scope])
    )
    caption = (
        f"a against b in percent, with the 95% interval of a paired bootstrap over prompts, {where}. "
        "Bold: the interval excludes zero."
    )
    return Table(name, caption, ["a", "b", *map(title_of, columns)], rows, 2, strong)


def _delta(c: Comparison) -> str:
    interval = "" if c.ci_low is None else f" [{_signless(c.ci_low)}, {_signless(c.ci_high or 0.0)}]"
    return f"{c.delta_pct:+.1f}".replace("-", "−") + interval


def _signless(value: float) -> str:
    return f"{value:.1f}".replace("-", "−")


def _excludes_zero(c: Comparison) -> bool:
    return c.ci_low is not None and c.ci_high is not None and (c.ci_low > 0 or c.ci_high < 0)


def stage_table(series: Sequence[Series], name: str, where: str) -> Table | None:
    """Milliseconds per round by stage, one row a configuration, run and temperature; None without `stage_ms`."""
    times = [(one, found) for one in series if (found := stage_times(one.records))]
    if not times:
        return None
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


def ablation_table(
    cells: Sequence[Cell], comparisons: Sequence[Comparison], name: str, where: str
) -> Table | None:
    """The ablation variants of one model and temperature, overall, each with its difference to what it varies.

    None where there is no variant.
    """
    variants = [c for c in cells if c.configuration.variant is not None and c.dataset == "overall"]
    if not variants:
        return None
    against: dict[tuple[Configuration, str], list[Comparison]] = {}
    for c in comparisons:
        if c.scope == "overall":
            against.setdefault((c.a, c.a_run), []).append(c)
    rows = []
    for cell in variants:
        texts = [f"{_delta(c)} against {c.b.label}" for c in against.get((cell.configuration, cell.run), ())]
        rows.append(
            [
                cell.configuration.label,
                cell.run,
                _fixed(cell.speedup),
                f"{cell.tau:.2f}",
                f"{cell.tokens_per_s:.1f}",
                str(cell.n),
                "; ".join(texts) or DASH,
            ]
        )
    head = ["method", "run", "speedup", "tau", "tokens/s", "n", "difference in speed, %"]
    return Table(name, f"Ablation variants, overall, {where}.", head, rows, 2)


def endings_table(series: Sequence[Series], name: str, where: str) -> Table | None:
    """Share of answers that ended by themselves or were cut by length, and tau of each; None if unknown."""
    found = [(one, how) for one in series if (how := endings(one.records))]
    if not found:
        return None

    def row(one: Series, how: Endings) -> list[str]:
        shares = [f"{100 * share:.1f}" for share in (how.stop_share, how.length_share)]
        labels = [one.configuration.label, one.run, f"{one.temperature:g}", str(how.n)]
        return [*labels, *shares, _fixed(how.stop_tau), _fixed(how.length_tau)]

    head = ["method", "run", "T", "n", "stopped, %", "cut by length, %", "tau, stopped", "tau, cut"]
    caption = f"Answers that ended by themselves and answers cut by the length limit, {where}."
    return Table(name, caption, head, [row(*pair) for pair in found], 3)
