"""How far a long command is: a bar with the time left on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dominotree.cli.common import screen

Show = Callable[[int, int, str], None]
"""`(done, total, what is told beside it)`."""

_SECONDS_BETWEEN_LINES = 60


@contextmanager
def progress_bar(noun: str) -> Iterator[Show]:
    """Gives a function that shows how many `noun` are done of how many; the first call counts as the beginning."""
    if not sys.stderr.isatty():
        yield _line_now_and_then(noun)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=Console(file=sys.stderr), speed_estimate_period=600) as bar:

        def show(done: int, total: int, doing: str) -> None:
            if not bar.tasks:
                bar.add_task("", total=total, completed=done)
            bar.update(bar.tasks[0].id, completed=done, description=doing)

        yield show


def _line_now_and_then(noun: str) -> Show:
    started = said = time.monotonic()
    done_before: int | None = None

    def show(done: int, total: int, doing: str) -> None:
        nonlocal done_before, said
        if done_before is None:
            done_before = done
        now = time.monotonic()
        if now - said >= _SECONDS_BETWEEN_LINES and done > done_before:
            said = now
            left = (now - started) / (done - done_before) * (total - done) / 60
            screen.note(f"{done} of {total} {noun}, about {left:.0f} min left" + (f", {doing}" if doing else ""))

    return show
