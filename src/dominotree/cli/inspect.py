"""`dominotree inspect`: what a checkpoint is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from dominotree.cli import common
from dominotree.cli.common import screen

_WIDTH = 26


def inspect(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="Folder, hub id, or name of a pair or drafter.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print what a target, a drafter or a pair is, and what here can run it. A hub's weights are not fetched."""
    common.show_notices()
    from dominotree.inspection import inspect as look

    found = look(checkpoint)
    if as_json:
        screen.write(json.dumps(found) + "\n")
        return
    for line in _lines(found):
        screen.write(line + "\n")


def _lines(found: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """A line for each thing that is known; what a thing consists of is indented below it."""
    for name, value in found.items():
        label = f"{indent}{name.replace('_', ' ')}"
        if name == "weights" and value is not None:
            yield f"{label:<{_WIDTH}}{_weights(value)}"
        elif isinstance(value, Mapping):
            yield label
            yield from _lines(value, indent + "  ")
        elif value is not None and value != []:
            yield f"{label:<{_WIDTH}}{_plain(value)}"


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _weights(value: Mapping[str, Any]) -> str:
    dtypes = ", ".join(f"{count:,} {dtype}" for dtype, count in value["dtypes"].items())
    size = value["bytes"] / 2**20
    return f"{value['parameters'] / 1e6:.1f} million parameters, {size:.0f} MiB in {value['files']} file(s): {dtypes}"
