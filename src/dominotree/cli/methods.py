"""`dominotree methods`: how one can draft."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from dominotree.cli.common import screen


def methods(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List the methods: whose drafter, how nodes are scored, chain or tree, what sets a tree's size."""
    from dominotree.methods import METHODS

    rows = []
    for method in METHODS.values():
        row = asdict(method)
        rule = row.pop("rule")
        rows.append({**row, "budget": rule if method.shape == "tree" else "none"})
    if as_json:
        screen.write(json.dumps(rows, indent=2) + "\n")
        return
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE)
    names = ("name", "drafter", "score", "shape", "budget", "summary")
    for name in names:
        table.add_column({"name": "method"}.get(name, name), no_wrap=name != "summary")
    for row in rows:
        table.add_row(*("-" if row[name] == "none" else row[name] for name in names))
    screen.table(table)
