"""`dominotree report`: tables, figures and a page from the records of one or several runs."""

from pathlib import Path
from typing import Annotated

import typer

from dominotree.cli import common


def report(
    dirs: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run folders, or single .jsonl files.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write the report into.")] = Path("report"),
    resamples: Annotated[int, typer.Option(min=1, help="Resamples of the paired bootstrap.")] = 10_000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the paired bootstrap.")] = 0,
) -> None:
    """Make tables, figures and one self-contained page from benchmark records."""
    with common.needs_extra("bench", "report"):
        from dominotree.bench.report import write_report

    made = write_report(dirs, out, resamples=resamples, seed=seed)
    for line in made.notes:
        typer.echo(f"Note: {line}", err=True)
    for line in made.left_out:
        typer.echo(f"Left out: {line}", err=True)
    typer.echo(f"{made.records} records, {made.configurations} configurations, {made.runs} runs")
    typer.echo(f"{out / 'report.html'} and {len(made.files) - 1} more files")
