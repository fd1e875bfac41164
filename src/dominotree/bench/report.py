"""The report of one or several runs: Markdown, CSV, LaTeX, figures and one self-contained page."""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from dominotree import __version__
from dominotree.bench import figures, tables
from dominotree.bench.figures import Drawing, MissingData, Palette
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
from dominotree.bench.tables import Table
from dominotree.errors import DominoTreeError


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
    where records have a `variant`, `variants.csv` and `ablations.csv`. Each file is replaced as a whole.
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
    measured = _Measured(
        series,
        cells(series),
        compare(default_pairs(series), resamples=resamples, seed=seed),
        compare(ablation_pairs(series), resamples=resamples, seed=seed),
        found.calibration,
    )
    sections = _sections(measured)
    remarks = notes(series) + _undescribed_runs(found)
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
        "tables.tex": "\n".join(tables.latex(table) for section in sections for table in section.tables),
        "report.md": _render("report.md", content),
        "report.html": _render("report.html", content),
    }
    if any(one.configuration.variant for one in series):
        files["variants.csv"] = tables.variants_csv(measured.cells)
        files["ablations.csv"] = tables.ablations_csv(measured.ablations)
    for drawing in (drawing for section in sections for drawing in section.figures):
        files[f"figures/{drawing.name}.svg"] = drawing.svg
        files[f"figures/{drawing.name}.png"] = drawing.png
        files[f"figures/{drawing.name}-dark.png"] = drawing.png_dark
    for name, data in files.items():
        _replace(out / name, data.encode() if isinstance(data, str) else data)
    return Report(
        out,
        tuple(map(Path, sorted(files))),
        tuple(remarks),
        tuple(line for section in sections for line in section.left_out),
        len(found.records),
        len({one.run for one in series}),
        len({one.configuration for one in series}),
    )


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

    def name(self, kind: str) -> str:
        """The name of this part's table or figure of a kind, fit for a file."""
        return kind + self.suffix

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
                (f"-{_slug(model)}" if len(models) > 1 else "")
                + ("" if temperature is None else f"-T{temperature:g}"),
            )


def _only(items: Sequence[_Item], model: str, temperature: float | None) -> list[_Item]:
    return [item for item in items if item.model == model and temperature in (None, item.temperature)]


@dataclass(frozen=True)
class Section:
    """A part of the report: what it is about, its figures and tables, and what was left out and why."""

    title: str
    text: str
    figures: list[Drawing] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    missing: dict[str, list[str]] = field(default_factory=dict)

    @property
    def anchor(self) -> str:
        """The section's address in the page."""
        return _slug(self.title)

    @property
    def left_out(self) -> list[str]:
        """One line for each reason why something is not shown, with the models and temperatures it holds for."""
        return [f"{self.title}, {'; '.join(places)}: {reason}." for reason, places in self.missing.items()]

    def show(self, where: str, make: Callable[[], Drawing | Table]) -> None:
        """Add what `make` returns, or keep the reason it gives for having nothing to show."""
        try:
            made = make()
        except MissingData as missing:
            self.missing.setdefault(str(missing), []).append(where)
            return
        if isinstance(made, Table):
            self.tables.append(made)
        else:
            self.figures.append(made)


def _sections(measured: _Measured) -> list[Section]:
    """The parts of the report in reading order."""
    palette = Palette(one.configuration for one in measured.series)
    speed = Section(
        "Speedup and acceptance length",
        "Speedup of a method on a data set: its mean tokens/s over prompts, divided by that of autoregressive "
        "decoding (ar) in the same run at the same temperature. Tau: tokens committed per round, mean over "
        "rounds and then over prompts. Math, Code, Chat and Overall are plain means over the sets measured.",
    )
    paired = Section(
        "Paired differences",
        "Each prompt is compared with itself: by tokens/s within a run; across runs by its speedup over its own "
        "run's ar on that prompt. Groups pool the prompts of their sets.",
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
        where = part.where
        for section, kind, make, data in (
            (speed, "speedup", figures.speed_bars, plain),
            (budgets, "budget", figures.budget_lines, part.cells),
            (ablations, "width", figures.width_lines, part.cells),
            (depths, "depth", figures.depth_lines, part.series),
            (speed, "speedup", tables.speed_table, plain),
            (speed, "throughput", tables.throughput_table, plain),
            (paired, "pairwise", tables.pairwise_table, part.comparisons),
        ):
            ...
    return [speed, paired, stages, budgets, ablations, depths, calibration, endings]
