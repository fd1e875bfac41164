"""Figures of the report, drawn to be read on light and on dark ground, one colour a method throughout."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dominotree.bench.records import CalibrationBin
from dominotree.bench.statistics import (
    GROUPS,
    METHOD_ORDER,
    Cell,
    Configuration,
    Series,
    acceptance_by_depth,
    budget_curves,
    calibration_error,
    reliability,
    scopes,
    stage_times,
    width_curves,
)
from dominotree.bench.tables import title_of

# Okabe and Ito's colour-blind safe palette, without the yellow and the black that vanish on one of the grounds.
_COLOURS = dict(
    zip(
        METHOD_ORDER,
        (
            "#8b929a",
            "#56b4e9",
            "#0a7cc4",
            "#009e73",
            "#e69f00",
            "#cc79a7",
            "#8e6fc1",
            "#a5763a",
            "#d55e00",
        ),
        strict=True,
    )
)
_MORE_COLOURS = ("#44aa99", "#aa4499", "#999933", "#6699cc", "#bb5566")
_STAGE_COLOURS = {"draft": "#56b4e9", "build": "#e69f00", "verify": "#0a7cc4", "commit": "#009e73"}
_MARKERS = "osD^vPX<>"

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


class MissingData(Exception):
    """What a figure would need and the records do not have, in one line for the reader of the report."""


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
    style = (
        f"<style>:root{{color:{_INK}}}@media (prefers-color-scheme:dark){{:root{{color:{_DARK_INK}}}}}</style>"
    )
    svg = svg.replace(_INK, "currentColor").replace("'DejaVu Sans'", "system-ui, 'DejaVu Sans', sans-serif")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return re.sub(r"(<svg[^>]*>)", lambda match: match[1] + "\n " + style, svg, count=1)


class Palette:
    """One colour a method; further budgets and variants of it get lighter; each configuration has a marker."""

    def __init__(self, configurations: Iterable[Configuration]) -> None:
        ordered = sorted(set(configurations), key=lambda configuration: configuration.rank)
        unknown = list(dict.fromkeys(c.method for c in ordered if c.method not in _COLOURS))
        self._colours = _COLOURS | {m: _MORE_COLOURS[i % 5] for i, m in enumerate(unknown)}
        self._places: dict[Configuration, int] = {}
        for method in dict.fromkeys(c.method for c in ordered):
            of_method = [c for c in ordered if c.method == method]
            self._places |= {c: place for place, c in enumerate(of_method)}

    def method(self, method: str) -> str:
        """The method's colour, `#rrggbb`."""
        return self._colours[method]

    def marker(self, method: str) -> str:
        """The method's marker, so that lines differ by more than colour."""
        return _MARKERS[list(self._colours).index(method) % len(_MARKERS)]

    def line(self, configuration: Configuration) -> dict[str, object]:
        """Matplotlib's keywords for the configuration's line or bar."""
        return {
            "color": self.method(configuration.method),
            "alpha": max(0.35, 1 - 0.2 * self._places[configuration]),
        }


def _plain(text: str) -> str:
    return text.replace("$", r"\$")


def _key(configuration: Configuration, run: str, several_runs: bool) -> str:
    return _plain(configuration.label + (f" [{run}]" if several_runs else ""))


def speed_bars(cells: Sequence[Cell], palette: Palette, name: str, where: str) -> Drawing:
    """Speedup and tau by data set and group: two rows of bars for one model and temperature.

    Of a method with several budgets in a run the fastest is shown, of `ar` only the line at 1. Raises
    MissingData where there is nothing but `ar`.
    """
    columns = list(scopes(c.dataset for c in cells if c.dataset not in GROUPS))
    by_row: dict[tuple[Configuration, str], dict[str, Cell]] = {}
    for cell in cells:
        if cell.configuration.variant is None and cell.configuration.method != "ar":
            by_row.setdefault((cell.configuration, cell.run), {})[cell.dataset] = cell
    if not by_row:
        raise MissingData("no method besides `ar` was measured")
    fastest: dict[tuple[str, str], tuple[Configuration, str]] = {}
    for row, found in by_row.items():
        held = fastest.setdefault((row[0].method, row[1]), row)
        if _typical(found).tokens_per_s > _typical(by_row[held]).tokens_per_s:
            fastest[row[0].method, row[1]] = row
    shown = list(fastest.values())
    several_runs = len({configuration for configuration, _ in shown}) < len(shown)
    has_speedup = any(cell.speedup is not None for row in shown for cell in by_row[row].values())

    def plot(figure: Figure) -> None:
        upper, lower = figure.subplots(2, 1, sharex=True)
        width = 0.84 / len(shown)
        for i, row in enumerate(shown):
            found = by_row[row]
            places = [j + (i - (len(shown) - 1) / 2) * width for j, s in enumerate(columns) if s in found]
            present = [found[s] for s in columns if s in found]
            speeds = [c.speedup if has_speedup else c.tokens_per_s for c in present]
            look = palette.line(row[0])
            label = _key(*row, several_runs)
            heights = [speed or 0.0 for speed in speeds]
            upper.bar(places, heights, width * 0.92, label=label, **look)
            lower.bar(places, [c.tau for c in present], width * 0.92, **look)
        for axes in (upper, lower):
            axes.grid(axis="x", visible=False)
            if axes is lower or has_speedup:
                axes.axhline(1, color=matplotlib.rcParams["text.color"], linewidth=0.9, linestyle="--")
        upper.set_title("Speedup over autoregressive" if has_speedup else "Tokens per second")
        lower.set_title("Mean accepted length (tau)")
        lower.set_xticks(range(len(columns)), [_plain(title_of(s)) for s in columns])
        if len(columns) > 5:
            lower.tick_params(axis="x", labelrotation=20)
        figure.legend(loc="outside upper center", ncols=min(len(shown), 5))

    size = (max(5.0, min(11.0, 1.6 + 0.17 * len(columns) * (len(shown) + 1))), 5.2)
    several_budgets = len(by_row) > len(shown)
    best = " Each method at its fastest budget." if several_budgets else ""
    return draw(name, f"Speedup and tau by data set, {where}.{best}", plot, size)


def _typical(found: Mapping[str, Cell]) -> Cell:
    return found.get("overall") or next(iter(found.values()))


def stage_bars(series: Sequence[Series], _palette: Palette, name: str, where: str) -> Drawing:
    """Milliseconds per round by stage, a stacked bar a configuration, run and temperature.

    Raises MissingData where no record has `stage_ms`.
    """
    times = [(one, found) for one in series if (found := stage_times(one.records))]
    if not times:
        raise MissingData("no record has `stage_ms`")
    stages = list(dict.fromkeys(stage for _, found in times for stage in found))
    several_runs = len({one.run for one, _ in times}) > 1
    labels = [f"{_key(s.configuration, s.run, several_runs)}  T={s.temperature:g}" for s, _ in times]
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
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("milliseconds per round")
        axes.set_xlim(0, longest * 1.1)
        figure.legend(loc="outside upper center", ncols=len(stages))

    return draw(
        name, f"Where the time of a round goes, mean over prompts, {where}.", plot, (7.2, 1.3 + 0.36 * len(times))
    )


_Curves = Mapping[tuple[str, str, float, str], Sequence[Cell]]


def budget_lines(cells: Sequence[Cell], palette: Palette, name: str, where: str) -> Drawing:
    """Tau and throughput against the node budget, overall, with the methods that have no budget as levels.

    Raises MissingData where no method was measured at two budgets.
    """
    curves = budget_curves(cells)
    if not curves:
        raise MissingData("no method was measured at two budgets or more")
    runs = {run for run, *_ in curves}
    levels = [
        cell
        for cell in cells
        if cell.dataset == "overall" and cell.configuration[1:] == (None, None) and cell.run in runs
    ]
    ticks = sorted({c.configuration.budget or 0 for curve in curves.values() for c in curve})

    def plot(figure: Figure) -> None:
        for axes, (value, title) in zip(figure.subplots(1, 2), _measures(cells), strict=True):
            for (run, _, _, method), curve in curves.items():
                look = {"color": palette.method(method), "marker": palette.marker(method)}
                label = _key(Configuration(method), run, len(runs) > 1)
                x = [cell.configuration.budget or 0 for cell in curve]
                axes.plot(x, [value(cell) for cell in curve], label=label, **look)
            for cell in levels:
                label = _key(cell.configuration, cell.run, len(runs) > 1)
                colour = palette.method(cell.configuration.method)
                axes.axhline(value(cell), color=colour, linestyle="--", linewidth=1.2, label=label)
            axes.set_xscale("symlog", base=2, linthresh=1)
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
            axes.minorticks_off()
            axes.set_xlabel("node budget")
            axes.set_title(title)
        _shared_legend(figure)

    return draw(name, f"Tau and speed against the node budget, overall, {where}.", plot, (8.2, 3.6))


def width_lines(cells: Sequence[Cell], palette: Palette, name: str, where: str) -> Drawing:
    """Tau and throughput against the candidate width M, overall, from the variants "M=<width>".

    Raises MissingData where no configuration has two such variants.
    """
    curves = width_curves(cells)
    if not curves:
        raise MissingData('no configuration has two variants "M=<width>" or more')
    runs = {run for run, *_ in curves}
    widths = sorted({width for curve in curves.values() for width, _ in curve}, key=lambda m: m or 1 << 62)
    place = {width: i for i, width in enumerate(widths)}

    def plot(figure: Figure) -> None:
        for axes, (value, title) in zip(figure.subplots(1, 2), _measures(cells), strict=True):
            for (run, _, _, label), curve in curves.items():
                configuration = curve[0][1].configuration
                look = palette.line(configuration) | {"marker": palette.marker(configuration.method)}
                x = [place[width] for width, _ in curve]
                shown = _plain(label + (f" [{run}]" if len(runs) > 1 else ""))
                axes.plot(x, [value(cell) for _, cell in curve], label=shown, **look)
            axes.set_xticks(range(len(widths)), [str(width) if width else "all" for width in widths])
            axes.set_xlabel("candidate width M")
            axes.set_title(title)
        _shared_legend(figure)

    return draw(name, f"Tau and speed against the candidate width, overall, {where}.", plot, (8.2, 3.6))


def _measures(cells: Sequence[Cell]) -> list[tuple[Callable[[Cell], float], str]]:
    """Tau, and speedup where every cell has one or else tokens/s, each with its title."""
    tau: tuple[Callable[[Cell], float], str] = (lambda cell: cell.tau, "Mean accepted length (tau)")
    if all(cell.speedup is not None for cell in cells):
        return [tau, (lambda cell: cell.speedup or 0.0, "Speedup over autoregressive")]
    return [tau, (lambda cell: cell.tokens_per_s, "Tokens per second")]


def _shared_legend(figure: Figure) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(len(labels), 5))


def depth_lines(series: Sequence[Series], palette: Palette, name: str, where: str) -> Drawing:
    """Share of rounds in which the draft was accepted down to each depth, for one model and temperature.

    Raises MissingData where no record has `accepted`.
    """
    found = [(one, shares) for one in series if len(shares := acceptance_by_depth(one.records))]
    if not found:
        raise MissingData("no record has `accepted`, the tokens committed round by round")
    several_runs = len({one.run for one, _ in found}) > 1

    def plot(figure: Figure) -> None:
        axes = figure.subplots()
        for one, shares in found:
            look = palette.line(one.configuration) | {"marker": palette.marker(one.configuration.method)}
            label = _key(one.configuration, one.run, several_runs)
            axes.plot(range(len(shares)), shares, label=label, markersize=3.5, **look)
        axes.set_ylim(0, 1)
        axes.set_xlabel("draft depth d (0 is the first draft token)")
        axes.set_ylabel("share of rounds")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(loc="best", ncols=1 + (len(found) > 6))

    return draw(name, f"Share of rounds whose draft was accepted at depth d, {where}.", plot, (6.4, 3.6))


def calibration_lines(
    bins: Sequence[CalibrationBin], _palette: Palette, name: str, where: str
) -> Drawing:
    """Predicted path probability against the share of nodes accepted, pooled over depths; dot area grows with n.

    Raises MissingData without bins.
    """
    if not bins:
        raise MissingData("no run folder has a `calibration.jsonl`")
    curves = reliability(bins)
    most = max(one.n for curve in curves.values() for one in curve)

    def plot(figure: Figure) -> None:
        axes = figure.subplots()
        ink = matplotlib.rcParams["text.color"]
        axes.plot([0, 1], [0, 1], color=ink, linestyle="--", linewidth=0.9, label="as predicted")
        colours = [_COLOURS["dominotree"], _COLOURS["ddtree"], _COLOURS["caddtree"], *_MORE_COLOURS]
        for i, (label, curve) in enumerate(curves.items()):
            colour = colours[i % len(colours)]
            x, y = ([one.mean_predicted for one in curve], [one.accepted_rate for one in curve])
            text = _plain(f"{label} (ECE {calibration_error(curve):.3f})")
            axes.plot(x, y, color=colour, label=text)
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
