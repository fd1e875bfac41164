"""`dominotree profile`: what a round costs on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dominotree.cli import common


def profile(
    target: common.Target = None,
    drafter: common.DrafterName = None,
    dtype: common.Dtype = "auto",
    device: common.Device = "auto",
    threads: common.Threads = None,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="Measurements of each point; their median counts.")
    ] = 9,
    plot: Annotated[Path | None, typer.Option("--plot", help="Also draw the curves into this PNG or SVG file.")] = None,
) -> None:
    """Measure draft, build and verify time; caddtree, condadaptive and adaptive need it once per machine."""
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from dominotree.costs import CONTEXTS, ROWS, measure, profile_path
    from dominotree.errors import InvalidRequest
    from dominotree.pair import load

    pair = load(target=target, drafter=drafter, dtype=dtype, device=device, threads=threads)
    used = pair.drafter or pair.dflash_drafter
    if used is None:
        raise InvalidRequest("a profile needs a drafter; give one (--drafter)")
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=len(CONTEXTS) * len(ROWS) * repeats)
        costs = measure(pair.name, pair.target, used, repeats=repeats, tick=lambda: progress.advance(task))
    path = profile_path(costs.key)
    costs.save(path)
    table = Table("context", "draft ms", *(f"{rows} rows" for rows in costs.rows))
    for context, draft, curve in zip(costs.contexts, costs.draft_ms, costs.verify_ms, strict=True):
        table.add_row(str(context), f"{draft:.1f}", *(f"{ms:.1f}" for ms in curve))
    console = Console()
    console.print("Verify time in ms, fitted (monotone and convex in the rows):")
    console.print(table)
    console.print(f"kept in {path}", soft_wrap=True)
    if plot is not None:
        from dominotree.bench.figures import cost_lines, save_figure

        save_figure(cost_lines(costs.rows, costs.contexts, costs.measured_ms, costs.verify_ms), plot)
