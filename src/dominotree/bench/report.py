"""The report of one or several runs: Markdown, CSV, LaTeX, figures and one self-contained page."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from dominotree import __version__
from dominotree.bench import figures, tables
from dominotree.bench.figures import Drawing
from dominotree.bench.records import CalibrationBin, RecordSet, read_records
from dominotree.bench.statistics import (
    Cell,
    Comparison,
    Series,
    ablation_pairs,
    cells,
    collect,
    compare,
    default_pairs,
    notes,
)
from dominotree.bench.tables import MissingData, Table
from dominotree.errors import DominoTreeError
from dominotree.files import write_whole


class InvalidReport(DominoTreeError):
    """A report that cannot be written where or as it was asked for."""


@dataclass(frozen=True)
class Report:
    """What `write_report` wrote: the files, relative to `out`, and the notes and omissions it shows.

    `records`, `runs` and `configurations` count what was read.
    """

    out: Path
    files: tuple[Path, ...]
    notes: tuple[str, ...]
    left_out: tuple[str, ...]
    records: int
    runs: int
    configurations: int


def write_report(inputs: Sequence[Path], out: Path, *, resamples: int = 10_000, seed: int = 0) -> Report:
    """Read run folders and record files and write the report on them into the folder `out`.

    Written are `report.md`, `report.html` (one file, nothing loaded from elsewhere), `cells.csv`,
    `pairwise.csv`, `tables.tex`, `figures/*.svg`, `figures/*.png` (and `*-dark.png` for dark ground), and,
    where records have a `variant`, `variants.csv` and `ablations.csv`. Each file is replaced as a whole, and those of
    an earlier report that this one has no data for are removed.
    Statistics follow the evaluation protocol (see `statistics`): `resamples` and `seed` are those of the
    paired bootstrap. Equal inputs give equal files. A figure whose data is missing is left out, and the
    report says which and why.

    Raises InvalidRecord where the input holds no valid records, InvalidReport where `out` is no folder or
    `resamples` or `seed` is out of range.
    """
    if resamples < 1 or seed < 0:
        raise InvalidReport(f"resamples is {resamples}, seed {seed}: expected 1 or more, and 0 or more")
    if out.exists() and not out.is_dir():
        raise InvalidReport(f"{out} is a file: give a folder to write the report into")
    found = read_records(inputs)
    series = collect(found.records)
    pairs, unlike = _of_like_runs(default_pairs(series), found)
    measured = _Measured(
        series,
        cells(series),
        compare(pairs, resamples=resamples, seed=seed),
        compare(ablation_pairs(series), resamples=resamples, seed=seed),
        found.calibration,
    )
    sections = _sections(measured)
    shown = [one for section in sections for one in section.shown]
    remarks = notes(series) + unlike + _undescribed_runs(found)
    options = ([] if resamples == 10_000 else [f"--resamples={resamples}"]) + ([f"--seed={seed}"] if seed else [])
    content = {
        "command": shlex.join(["dominotree", "report", *map(str, inputs), "--out", str(out), *options]),
        "version": __version__,
        "runs": _runs(found, series),
        "notes": remarks,
        "sections": sections,
        "resamples": resamples,
        "seed": seed,
    }
    files: dict[str, str | bytes] = {
        "cells.csv": tables.cells_csv(measured.cells),
        "pairwise.csv": tables.pairwise_csv(measured.comparisons),
        "tables.tex": "\n".join(map(tables.latex, (one for one in shown if isinstance(one, Table)))),
        "report.md": _render("report.md", content),
        "report.html": _render("report.html", content),
    }
    if any(one.configuration.variant for one in series):
        files["variants.csv"] = tables.variants_csv(measured.cells)
        files["ablations.csv"] = tables.ablations_csv(measured.ablations)
    for drawing in (one for one in shown if isinstance(one, Drawing)):
        files[f"figures/{drawing.name}.svg"] = drawing.svg
        files[f"figures/{drawing.name}.png"] = drawing.png
        files[f"figures/{drawing.name}-dark.png"] = drawing.png_dark
    for name, data in files.items():
        _replace(out / name, data)
    for stale in {file for pattern in _OURS for file in out.glob(pattern)} - {out / name for name in files}:
        stale.unlink()
    return Report(
        out,
        tuple(map(Path, sorted(files))),
        tuple(remarks),
        tuple(line for section in sections for line in section.left_out),
        len(found.records),
        len({one.run for one in series}),
        len({one.configuration for one in series}),
    )


_LENGTH = "max_new_tokens"
_FIGURES = ("speedup", "stages", "budget", "width", "depth", "calibration")
_OURS = ("variants.csv", "ablations.csv", *(f"figures/{kind}*.{end}" for kind in _FIGURES for end in ("svg", "png")))
"""What an earlier report may have written here that this one has no data for."""

_Maker = Callable[[Any, str, str], Drawing | Table]
_Item = TypeVar("_Item", Series, Cell, Comparison)


@dataclass(frozen=True)
class _Measured:
    """Everything computed from the records, or the part of it that one table or figure shows."""

    series: Sequence[Series]
    cells: Sequence[Cell]
    comparisons: Sequence[Comparison]
    ablations: Sequence[Comparison]
    calibration: Sequence[CalibrationBin]
    where: str = "all runs"
    suffix: str = ""

    def split(self, *, temperatures: bool) -> Iterator[_Measured]:
        """The parts of each model, and of each temperature of it where asked for."""
        models = {one.model for one in self.series}
        for model, temperature in dict.fromkeys(
            (one.model, one.temperature if temperatures else None) for one in self.series
        ):
            yield _Measured(
                _only(self.series, model, temperature),
                _only(self.cells, model, temperature),
                _only(self.comparisons, model, temperature),
                _only(self.ablations, model, temperature),
                self.calibration,
                model + ("" if temperature is None else f" at T={temperature:g}"),
                (f"-{_slug(model)}" if len(models) > 1 else "") + ("" if temperature is None else f"-T{temperature:g}"),
            )


def _only(items: Sequence[_Item], model: str, temperature: float | None) -> list[_Item]:
    return [item for item in items if item.model == model and temperature in (None, item.temperature)]


@dataclass(frozen=True)
class Section:
    """A part of the report: what it is about, what it shows in order, and what was left out and why."""

    title: str
    text: str
    shown: list[Drawing | Table] = field(default_factory=list)
    missing: dict[str, list[str]] = field(default_factory=dict)

    @property
    def anchor(self) -> str:
        """The section's address in the page."""
        return _slug(self.title)

    @property
    def left_out(self) -> list[str]:
        """One line for each reason why something is not shown; with the places, where others show it."""
        return [
            f"{self.title}{', ' + '; '.join(places) if self.shown else ''}: {reason}."
            for reason, places in self.missing.items()
        ]

    def show(self, make: _Maker, data: Sequence[Any], kind: str, part: _Measured) -> None:
        """Add what `make` makes of the data, or keep the reason it gives for having nothing to show."""
        try:
            self.shown.append(make(data, kind + part.suffix, part.where))
        except MissingData as missing:
            places = self.missing.setdefault(str(missing), [])
            places += [part.where] if part.where not in places else []


def _sections(measured: _Measured) -> list[Section]:
    """The parts of the report in reading order."""
    speed = Section(
        "Speedup and acceptance length",
        "Speedup of a method on a data set: its mean tokens/s over prompts, divided by that of "
        "autoregressive decoding (ar) in the same run at the same temperature. Tau: tokens committed per "
        "round, mean over rounds, then over prompts. Math, Code, Chat and Overall are plain means over the "
        "sets measured.",
    )
    paired = Section(
        "Paired differences",
        "Each prompt is compared with itself: by tokens/s within a run; across runs by its speedup over "
        "its own run's ar on that prompt. Groups pool the prompts of their sets.",
    )
    stages = Section("Time of a round", "Draft, build the tree, verify it, commit what was accepted.")
    budgets = Section("Budget", "What more nodes in the tree bring, and what they cost.")
    ablations = Section("Ablations", "Variants of a configuration, among them the candidate width M.")
    depths = Section(
        "Acceptance by depth",
        "A round that commits c tokens accepted the draft at depths 0 to c-2; the target adds the last one.",
    )
    calibration = Section("Calibration", "How far the drafter's own probabilities can be believed.")
    endings = Section("How answers ended", "Answers that stopped by themselves, and answers the limit cut off.")

    for part in measured.split(temperatures=True):
        plain = [cell for cell in part.cells if cell.configuration.variant is None]
        speed.show(figures.speed_bars, part.series, "speedup", part)
        speed.show(tables.speed_table, plain, "speedup", part)
        speed.show(tables.throughput_table, plain, "throughput", part)
        paired.show(tables.pairwise_table, part.comparisons, "pairwise", part)
        budgets.show(figures.budget_lines, plain, "budget", part)
        ablations.show(tables.variant_table, part.cells, "variants", part)
        if len(plain) < len(part.cells):
            ablations.show(figures.width_lines, part.cells, "width", part)
            ablations.show(tables.pairwise_table, part.ablations, "ablations", part)
        depths.show(figures.depth_lines, part.series, "depth", part)
    for part in measured.split(temperatures=False):
        stages.show(figures.stage_bars, part.series, "stages", part)
        stages.show(tables.stage_table, part.series, "stages", part)
        budgets.show(tables.tree_size_table, part.series, "tree-sizes", part)
        endings.show(tables.endings_table, part.series, "endings", part)
    calibration.show(figures.calibration_lines, measured.calibration, "calibration", measured)
    return [speed, paired, stages, budgets, ablations, depths, calibration, endings]


def _runs(found: RecordSet, series: Sequence[Series]) -> list[dict[str, Any]]:
    """What was measured in each run, and what its meta records say it was measured on and with."""
    runs = []
    for run in dict.fromkeys(one.run for one in series):
        own = [one for one in series if one.run == run]
        facts = {
            "model": ", ".join(dict.fromkeys(one.model for one in own)),
            "methods": ", ".join(dict.fromkeys(one.configuration.label for one in own)),
            "data sets": ", ".join(dict.fromkeys(name for one in own for name in one.sets)),
            "temperatures": ", ".join(dict.fromkeys(f"{one.temperature:g}" for one in own)),
            "records": str(sum(1 for one in own for _ in one.records)),
        }
        metas = [dict(_flat(meta.values)) for meta in found.metas if run in meta.runs]
        runs.append({"name": run, "facts": facts, "metas": metas})
    return runs


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            yield prefix + name, " ".join(map(str, value))
        else:
            yield prefix + name, str(value)


def _of_like_runs(
    pairs: Sequence[tuple[Series, Series]], found: RecordSet
) -> tuple[list[tuple[Series, Series]], list[str]]:
    """The pairs whose runs, as far as their metas tell, had the same prompts and lengths, and notes on the others."""
    asked: dict[str, dict[str, str]] = {}
    for meta in found.metas:
        told = {name: value for name, value in _flat(meta.values) if name.endswith(".sha256") or name == _LENGTH}
        for run in meta.runs:
            asked.setdefault(run, {}).update(told)
    kept: list[tuple[Series, Series]] = []
    unlike: dict[str, None] = {}
    for a, b in pairs:
        of_a, of_b = asked.get(a.run, {}), asked.get(b.run, {})
        different = [name for name in of_a.keys() & of_b.keys() if of_a[name] != of_b[name]]
        if a.run == b.run or not different:
            kept.append((a, b))
        else:
            what = _LENGTH if _LENGTH in different else "prompts"
            first, second = sorted((a.run, b.run))
            unlike[f"Runs '{first}' and '{second}' had other {what}, so they are not compared."] = None
    return kept, list(unlike)


def _undescribed_runs(found: RecordSet) -> list[str]:
    described = {run for meta in found.metas for run in meta.runs}
    runs = [run for run in dict.fromkeys(record.run for record in found.records) if run not in described]
    if not runs:
        return []
    names = ", ".join(f"'{run}'" for run in runs)
    return [f"No meta record for run {names}: hardware, versions and settings are not known here."]


def _render(name: str, content: Mapping[str, Any]) -> str:
    environment = Environment(
        loader=PackageLoader("dominotree.bench"),
        autoescape=lambda template: template is not None and template.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"markdown": tables.markdown, "inline_svg": _inline_svg}
    return environment.get_template(name).render(content)


def _inline_svg(drawing: Drawing) -> Markup:
    return Markup(drawing.inline_svg)  # matplotlib has escaped every label in it


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "x"


def _replace(path: Path, data: str | bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)
    except OSError as error:
        raise InvalidReport(f"cannot write {path} ({error.strerror}): give a folder that can be written") from None
