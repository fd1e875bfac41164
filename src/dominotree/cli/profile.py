"""`dominotree profile`: what a round costs on this machine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from dominotree.cli import common


def profile(
    target: common.Target = None,
    drafter: common.DrafterName = None,
    dflash_drafter: common.DFlashDrafter = None,
    dtype: common.Dtype = "auto",
    device: common.Device = "auto",
    threads: common.Threads = None,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="Measurements of each point; their median counts.")
    ] = 9,
    contexts: Annotated[
        str | None,
        typer.Option("--contexts", help="Context lengths to measure at, in tokens; those between are interpolated."),
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Also draw the curves into this PNG or SVG file.")] = None,
) -> None:
    """Measure draft, build and verify time; caddtree, condadaptive and adaptive need it once per machine."""
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from dominotree.costs import CONTEXTS, ROWS, measure, profile_path
    from dominotree.errors import InvalidRequest
    from dominotree.pair import load

    lengths = list(CONTEXTS) if contexts is None else sorted(set(common.comma_list("contexts", contexts, int)))
    if not lengths or lengths[0] < 1:
        raise InvalidRequest(f"--contexts is {contexts!r}; integers of at least 1 with commas between are expected")
    if plot is not None:  # before minutes of measuring
        with common.needs_extra("bench", "--plot"):
            from dominotree.bench.figures import check_figure, cost_lines, save_figure
        check_figure(plot)
    pair = load(
        target=target, drafter=drafter, dflash_drafter=dflash_drafter, dtype=dtype, device=device, threads=threads
    )
    room = pair.target.max_positions - max(ROWS) - 1
    if contexts is not None and lengths[-1] > room:
        raise InvalidRequest(f"--contexts names {lengths[-1]}; at most {room} fit this target")
    drafters = [one for one in (pair.drafter, pair.dflash_drafter) if one is not None]
    if not drafters:
        raise InvalidRequest("a profile needs a drafter; give one (--drafter)")
    console, measured = Console(), []
    for used in drafters:
        kind = "Domino" if used.head is not None else "DFlash"
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(f"measuring, {kind} drafter", total=len(lengths) * (len(ROWS) + 1) * repeats)
            tick = partial(progress.advance, task)
            costs = measure(pair.name, pair.target, used, contexts=lengths, repeats=repeats, tick=tick)
        path = profile_path(costs.key)
        costs.save(path)
        measured.append(costs)
        title = f"{kind} drafter, ms at a context of"
        table = Table("", *(f"{context} tokens" for context in costs.contexts), title=title)
        for d, depths in enumerate(costs.depths):
            table.add_row(f"draft {depths} deep", *(f"{curve[d]:.1f}" for curve in costs.draft_ms))
        for i, rows in enumerate(costs.rows):
            table.add_row(
                f"verify {rows} row{'s' if rows > 1 else ''}", *(f"{curve[i]:.1f}" for curve in costs.verify_ms)
            )
        further = [sum(both) for both in zip(costs.verify_each_ms, costs.draft_each_ms, strict=True)]
        table.add_row("each further sequence", *(f"{ms:.1f}" for ms in further))
        console.print(table)
        console.print(f"kept in {path}", soft_wrap=True)
    console.print("Verify times are fitted, monotone and convex in the rows.")
    if plot is not None:
        first = measured[0]
        save_figure(cost_lines(first.rows, first.contexts, first.measured_ms, first.verify_ms), plot)
