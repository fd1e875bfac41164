"""Figures of the report, drawn to be read on light and on dark ground, one colour a method throughout."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dominotree.bench.records import CalibrationBin
from dominotree.bench.statistics import (
    METHOD_ORDER,
    Cell,
    Configuration,
    Series,
    acceptance_by_depth,
    best_budgets,
    budget_curves,
    calibration_error,
    cells,
    reliability,
    scopes,
    stage_times,
    width_curves,
)
from dominotree.bench.tables import NO_STAGES, MissingData, row_labels, title_of
from dominotree.errors import InvalidRequest

# After Okabe and Ito, colour-blind safe, without the yellow and black that vanish on one of the grounds.
_COLOURS = dict(
    zip(
        METHOD_ORDER,
        (
            "#8b929a",
            "#117733",
            "#56b4e9",
            "#0a7cc4",
            "#009e73",
            "#e69f00",
            "#cc79a7",
            "#8e6fc1",
            "#a5763a",
            "#d55e00",
            "#882255",
        ),
        strict=True,
    )
)
_MORE_COLOURS = ("#44aa99", "#aa4499", "#999933", "#6699cc", "#bb5566")
_STAGE_COLOURS = {"draft": "#56b4e9", "build": "#e69f00", "verify": "#0a7cc4", "commit": "#009e73"}
_MARKERS = "osD^vPX<>hd*"

_INK = "#24292f"
_DARK_INK = "#e6e8eb"

_STYLE = {
    "font.family": ["DejaVu Sans"],
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.18,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.0,
    "svg.fonttype": "none",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


@dataclass(frozen=True)
class Drawing:
    """A finished figure: SVG whose ink follows the reader's colour scheme, and a PNG for either ground.

    `width` is the natural width in inches; the PNGs have transparent ground and 160 dots per inch.
    """

    name: str
    caption: str
    svg: str
    png: bytes
    png_dark: bytes
    width: float

    @property
    def inline_svg(self) -> str:
        """The SVG to be put into a page: no prolog, ids of its own, ink of the surrounding text."""
        svg = self.svg[self.svg.index("<svg") :]
        svg = re.sub(r"<style[^>]*>:root.*?</style>", "", svg, flags=re.DOTALL)
        return re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{self.name}-", svg)


def draw(name: str, caption: str, plot: Callable[[Figure], None], size: tuple[float, float]) -> Drawing:
    """Run `plot` on an empty figure of `size` inches and save it for light and dark ground.

    The same input gives the same bytes. Raises MissingData where `plot` does.
    """
    pictures: dict[str, bytes] = {}
    svg = ""
    for ink in (_INK, _DARK_INK):
        inks = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color")
        with matplotlib.rc_context({**_STYLE, **dict.fromkeys(inks, ink), "svg.hashsalt": name}):
            figure = Figure(figsize=size, layout="constrained")
            FigureCanvasAgg(figure)
            plot(figure)
            picture = io.BytesIO()
            figure.savefig(picture, format="png", dpi=160)
            pictures[ink] = picture.getvalue()
            if ink == _INK:
                text = io.StringIO()
                figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
                svg = _follow_scheme(text.getvalue())
    return Drawing(name, caption, svg, pictures[_INK], pictures[_DARK_INK], size[0])


def _follow_scheme(svg: str) -> str:
    dark = f"@media (prefers-color-scheme:dark){{:root{{color:{_DARK_INK}}}}}"
    style = f"<style>:root{{color:{_INK}}}{dark}</style>"
    svg = svg.replace(_INK, "currentColor").replace("'DejaVu Sans'", "system-ui, 'DejaVu Sans', sans-serif")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return re.sub(r"(<svg[^>]*>)", lambda match: match[1] + "\n " + style, svg, count=1)


def _colour(method: str) -> str:
    return _COLOURS.get(method) or _MORE_COLOURS[crc32(method.encode()) % len(_MORE_COLOURS)]


@dataclass(frozen=True)
class _Look:
    """How a series is drawn: the colour of its method, paler for each further configuration of it.

    Where a configuration was measured in several runs, `run` counts them, and the label names the run.
    """

    label: str
    method: str
    alpha: float
    run: int

    @property
    def bar(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "color": _colour(self.method),
            "alpha": self.alpha,
            "hatch": ("", "////", "....", "xxxx")[self.run % 4],
            "edgecolor": matplotlib.rcParams["text.color"],
            "linewidth": 0.0,
        }

    @property
    def line(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "color": _colour(self.method),
            "alpha": self.alpha,
            "linestyle": ("-", "--", ":", "-.")[self.run % 4],
            "marker": _marker(self.method),
        }


def _looks(drawn: Iterable[tuple[Configuration, str]]) -> list[_Look]:
    """The looks of (configuration, run) pairs, in their order."""
    pairs = list(drawn)
    configurations = sorted({configuration for configuration, _ in pairs}, key=lambda c: c.rank)
    of_method: Counter[str] = Counter()
    alphas: dict[Configuration, float] = {}
    for configuration in configurations:
        alphas[configuration] = max(0.35, 1 - 0.2 * of_method[configuration.method])
        of_method[configuration.method] += 1
    met: Counter[Configuration] = Counter()
    looks = []
    for (configuration, _), label in zip(pairs, row_labels(pairs), strict=True):
        looks.append(_Look(_plain(label), configuration.method, alphas[configuration], met[configuration]))
        met[configuration] += 1
    return looks


def _marker(method: str) -> str:
    known = method in METHOD_ORDER
    return _MARKERS[METHOD_ORDER.index(method) if known else crc32(method.encode()) % len(_MARKERS)]


def _plain(text: str) -> str:
    return text.replace("$", r"\$")


def _plain_series(series: Sequence[Series]) -> list[Series]:
    return [one for one in series if one.configuration.variant is None]


def speed_bars(series: Sequence[Series], name: str, where: str) -> Drawing:
    """Speedup and tau by data set and group: two rows of bars for one model and temperature.

    Of a method with several budgets in a run the fastest is shown, of `ar` only the line at 1. Tokens/s
    take the place of the speedup where no run has `ar`. Raises MissingData where there is nothing but `ar`.
    """
    methods = [one for one in _plain_series(series) if one.configuration.method != "ar"]
    shown = best_budgets(methods)
    if not shown:
        raise MissingData("no method besides ar was measured without a variant")
    rows = [{cell.dataset: cell for cell in cells([one])} for one in shown]
    columns = list(scopes(name for one in shown for name in one.sets))
    looks = _looks((one.configuration, one.run) for one in shown)
    has_speedup = any(cell.speedup is not None for row in rows for cell in row.values())

    def plot(figure: Figure) -> None:
        upper, lower = figure.subplots(2, 1, sharex=True)
        width = 0.84 / len(shown)
        for i, (row, look) in enumerate(zip(rows, looks, strict=True)):
            places = [j + (i - (len(shown) - 1) / 2) * width for j, s in enumerate(columns) if s in row]
            present = [row[s] for s in columns if s in row]
            speeds = [(cell.speedup or 0.0) if has_speedup else cell.tokens_per_s for cell in present]
            upper.bar(places, speeds, width * 0.92, **look.bar)
            lower.bar(places, [cell.tau for cell in present], width * 0.92, **look.bar)
        for axes in (upper, lower):
            axes.grid(axis="x", visible=False)
            if axes is lower or has_speedup:
                axes.axhline(1, color=matplotlib.rcParams["text.color"], linewidth=0.9, linestyle="--")
        upper.set_title("Speedup over autoregressive" if has_speedup else "Tokens per second")
        lower.set_title("Mean accepted length (tau)")
        lower.margins(x=0.01)
        lower.set_xticks(range(len(columns)), [_plain(title_of(s)) for s in columns])
        if len(columns) > 5:
            lower.tick_params(axis="x", labelrotation=20)
        _shared_legend(figure)

    size = (max(5.0, min(11.0, 1.6 + 0.17 * len(columns) * (len(shown) + 1))), 5.2)
    best = "" if len(shown) == len(methods) else " Each method at its fastest budget."
    return draw(name, f"Speedup and tau by data set, {where}.{best}", plot, size)


def stage_bars(series: Sequence[Series], name: str, where: str) -> Drawing:
    """Milliseconds per round by stage, a stacked bar a configuration and run, at the lowest temperature.

    Raises MissingData where no record has `stage_ms`.
    """
    times = [(one, found) for one in _plain_series(series) if (found := stage_times(one.records))]
    if not times:
        raise MissingData(NO_STAGES)
    stages = list(dict.fromkeys(stage for _, found in times for stage in found))
    coldest = min(one.temperature for one, _ in times)
    times = [(one, found) for one, found in times if one.temperature == coldest]
    labels = [look.label for look in _looks((one.configuration, one.run) for one, _ in times)]
    longest = max(sum(found.values()) for _, found in times)

    def plot(figure: Figure) -> None:
        axes = figure.subplots()
        starts = [0.0] * len(times)
        for i, stage in enumerate(stages):
            lengths = [found.get(stage, 0.0) for _, found in times]
            colour = _STAGE_COLOURS.get(stage) or _MORE_COLOURS[i % 5]
            axes.barh(range(len(times)), lengths, 0.62, left=starts, label=_plain(stage), color=colour)
            for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
                if length > 0.06 * longest:
                    text = f"{length:.1f}"
                    axes.text(start + length / 2, row, text, ha="center", va="center", color="#10151a")
            starts = [start + length for start, length in zip(starts, lengths, strict=True)]
        for row, total in enumerate(starts):
            axes.text(total + 0.01 * longest, row, f"{total:.1f}", va="center")
        axes.set_yticks(range(len(times)), labels)
        axes.margins(y=0.02)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("milliseconds per round")
        axes.set_xlim(0, longest * 1.1)
        _shared_legend(figure)

    return draw(
        name,
        f"Where the time of a round goes, mean over prompts, {where}, T={coldest:g}.",
        plot,
        (7.2, 1.3 + 0.36 * len(times)),
    )


def budget_lines(measured: Sequence[Cell], name: str, where: str) -> Drawing:
    """Tau and throughput against the node budget, overall, with the methods that have no budget as levels.

    Raises MissingData where no method was measured at two budgets.
    """
    curves = list(budget_curves(measured).values())
    if not curves:
        raise MissingData("no method was measured at two budgets or more")
    levels = [c for c in measured if c.dataset == "overall" and c.configuration[1:] == (None, None)]
    ticks = sorted({c.configuration.budget or 0 for curve in curves for c in curve})
    looks = _looks((Configuration(c.configuration.method), c.run) for c in (*levels, *(c[0] for c in curves)))

    def plot(figure: Figure) -> None:
        for axes, (value, title) in zip(figure.subplots(1, 2), _measures(measured), strict=True):
            for curve, look in zip(curves, looks[len(levels) :], strict=True):
                axes.plot([c.configuration.budget or 0 for c in curve], list(map(value, curve)), **look.line)
            for cell, look in zip(levels, looks, strict=False):
                axes.axhline(value(cell), **(look.line | {"linewidth": 1.0, "marker": ""}))
            axes.set_xscale("log" if ticks[0] else "symlog", base=2)
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
            axes.minorticks_off()
            axes.set_xlabel("node budget")
            axes.set_title(title)
        _shared_legend(figure)

    return draw(name, f"Tau and speed against the node budget, overall, {where}.", plot, (8.2, 3.8))


def width_lines(measured: Sequence[Cell], name: str, where: str) -> Drawing:
    """Tau and throughput against the candidate width M, overall, from the variants "M=<width>".

    Raises MissingData where no configuration has two such variants.
    """
    curves = list(width_curves(measured).values())
    if not curves:
        raise MissingData('no configuration has two variants "M=<width>" or more')
    widths = sorted({width for curve in curves for width, _ in curve}, key=lambda m: m or 1 << 62)
    looks = _looks((cell.configuration._replace(variant=None), cell.run) for ((_, cell), *_) in curves)

    def plot(figure: Figure) -> None:
        for axes, (value, title) in zip(figure.subplots(1, 2), _measures(measured), strict=True):
            for curve, look in zip(curves, looks, strict=True):
                places = [widths.index(width) for width, _ in curve]
                axes.plot(places, [value(cell) for _, cell in curve], **look.line)
            axes.set_xticks(range(len(widths)), [str(width) if width else "all" for width in widths])
            axes.set_xlabel("candidate width M")
            axes.set_title(title)
        _shared_legend(figure)

    return draw(name, f"Tau and speed against the candidate width, overall, {where}.", plot, (8.2, 3.8))


def _measures(measured: Sequence[Cell]) -> list[tuple[Callable[[Cell], float], str]]:
    """Tau, and speedup where every cell has one or else tokens/s, each with its title."""
    tau: tuple[Callable[[Cell], float], str] = (lambda cell: cell.tau, "Mean accepted length (tau)")
    if all(cell.speedup is not None for cell in measured):
        return [tau, (lambda cell: cell.speedup or 0.0, "Speedup over autoregressive")]
    return [tau, (lambda cell: cell.tokens_per_s, "Tokens per second")]


def _shared_legend(figure: Figure) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    inches = 0.08 * max(map(len, labels)) + 0.6
    columns = max(1, min(len(labels), int(figure.get_figwidth() / inches)))
    figure.legend(handles, labels, loc="outside upper left", ncols=columns)


def depth_lines(series: Sequence[Series], name: str, where: str) -> Drawing:
    """Share of rounds in which the draft was accepted down to each depth, for one model and temperature.

    Of a method with several budgets in a run the fastest is shown.
    Raises MissingData where no record has `accepted`.
    """
    drafted = [one for one in _plain_series(series) if len(acceptance_by_depth(one.records))]
    found = [(one, acceptance_by_depth(one.records)) for one in best_budgets(drafted)]
    if not found:
        raise MissingData("no record has accepted, the tokens committed round by round")
    looks = _looks((one.configuration, one.run) for one, _ in found)

    def plot(figure: Figure) -> None:
        axes = figure.subplots()
        for (_, shares), look in zip(found, looks, strict=True):
            axes.plot(range(len(shares)), shares, markersize=3.5, **look.line)
        axes.set_ylim(0, 1)
        axes.set_xlabel("draft depth d (0 is the first draft token)")
        axes.set_ylabel("share of rounds")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc="best", ncols=1 + (len(found) > 6))

    return draw(name, f"Share of rounds whose draft was accepted at depth d, {where}.", plot, (6.4, 3.6))


def calibration_lines(bins: Sequence[CalibrationBin], name: str, where: str) -> Drawing:
    """Predicted path probability against the share of nodes accepted, pooled over depths.

    The dots grow with the number of nodes.

    Raises MissingData without bins.
    """
    if not bins:
        raise MissingData("no run folder has a calibration.jsonl")
    curves = reliability(bins)
    most = max(one.n for curve in curves.values() for one in curve)

    def plot(figure: Figure) -> None:
        axes = figure.subplots()
        ink = matplotlib.rcParams["text.color"]
        axes.plot([0, 1], [0, 1], color=ink, linestyle="--", linewidth=0.9, label="as predicted")
        colours = [_COLOURS["dominotree"], _COLOURS["ddtree"], _COLOURS["caddtree"], *_MORE_COLOURS]
        for i, (label, curve) in enumerate(curves.items()):
            colour, line = colours[i % len(colours)], ("-", "--", ":")[i // len(colours) % 3]
            x, y = ([one.mean_predicted for one in curve], [one.accepted_rate for one in curve])
            text = _plain(f"{label} (ECE {calibration_error(curve):.3f})")
            axes.plot(x, y, color=colour, linestyle=line, label=text)
            axes.scatter(x, y, [8 + 90 * (one.n / most) ** 0.5 for one in curve], color=colour)
        axes.set_xlim(-0.03, 1.03)
        axes.set_ylim(-0.03, 1.03)
        axes.set_xlabel("predicted probability")
        axes.set_ylabel("share accepted")
        figure.legend(loc="outside upper left")

    caption = (
        f"Predicted path probability of draft nodes against the share accepted, pooled over depths, {where}; "
        "below the diagonal the drafter is over-confident. ECE: expected calibration error."
    )
    return draw(name, caption, plot, (5.0, 4.8))


def cost_lines(
    rows: Sequence[int],
    contexts: Sequence[int],
    measured: Sequence[Sequence[float]],
    fitted: Sequence[Sequence[float]],
) -> Drawing:
    """Verify time in ms against rows, a line for each context length: dots as measured, lines as fitted."""

    def plot(figure: Figure) -> None:
        axes = figure.subplots()
        for i, (context, dots, line) in enumerate(zip(contexts, measured, fitted, strict=True)):
            colour = _MORE_COLOURS[i % len(_MORE_COLOURS)]
            axes.plot(rows, line, color=colour, label=f"{context} tokens")
            axes.plot(rows, dots, color=colour, linestyle="none", marker="o", markersize=3.5)
        axes.set_xlabel("rows of a pass (root and nodes)")
        axes.set_ylabel("verify, ms")
        axes.set_ylim(bottom=0)
        axes.legend(loc="best", title="context")

    return draw("cost", "Verify time against rows: dots as measured, lines as fitted.", plot, (6.4, 3.6))


def check_figure(path: Path) -> None:
    """Raises `InvalidRequest` for a path that `save_figure` cannot write."""
    if path.suffix not in (".svg", ".png"):
        raise InvalidRequest(f"{path} has no ending .svg or .png; give one of them")
    if not path.parent.is_dir():
        raise InvalidRequest(f"the folder {path.parent} does not exist; make it, or name another one for {path.name}")


def save_figure(drawing: Drawing, path: Path) -> None:
    """Writes a drawing as SVG or PNG, by the ending of `path`; raises `InvalidRequest` for another ending."""
    check_figure(path)
    path.write_bytes(drawing.png if path.suffix == ".png" else drawing.svg.encode())
