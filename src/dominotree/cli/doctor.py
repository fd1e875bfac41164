"""`dominotree doctor`: what is wrong with a pair or a machine without saying so."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dominotree.cli import common
from dominotree.cli.common import progress_line, screen

if TYPE_CHECKING:
    from dominotree.doctor import Finding, Report

_COLUMNS = 100


def doctor(
    target: common.Target = None,
    drafter: common.DrafterName = None,
    method: common.MethodName = None,
    budget: common.Budget = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", help='Prompts of your own: JSONL, lines {"turns": [...]}; first turns count.'),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=8, help="Tokens of the target's answers that are looked at.")
    ] = 64,
    dtype: common.Dtype = "auto",
    device: common.Device = "auto",
    threads: common.Threads = None,
    exact: common.Exact = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, with every figure.")] = False,
) -> None:
    """Examine a pair and this machine for faults that raise no error, and say what to do about each.

    Exits with 1 where an error is found; warnings cost speed only.
    """
    common.show_notices()
    from dominotree.bench.datasets import read_set
    from dominotree.doctor import examine

    prompts = None if data is None else [turns[0] for turns in read_set(data).samples]
    with progress_line() as tick:
        report = examine(
            target,
            drafter,
            method=method,
            budget=budget,
            prompts=prompts,
            max_new_tokens=max_new_tokens,
            dtype=dtype,
            device=device,
            threads=threads,
            exact=exact,
            tick=tick,
        )
    if as_json:
        screen.write(json.dumps(report.to_json()) + "\n")
    else:
        _show(report)
    if report.count("error"):
        raise typer.Exit(1)


def _show(report: Report) -> None:
    facts = report.measured
    pair = report.target if report.drafter is None else f"{report.target} with {report.drafter}"
    threads = f", threads: {facts['threads']}" if facts["device"] == "cpu" else ""
    screen.write(f"{pair}, {facts['dtype']} on {facts['device']} ({facts['processor']}{threads})\n")
    if "tau" in facts:
        screen.write(
            f"tau {facts['tau']:.2f} over {facts['drafts']} drafts along the target's own answers; "
            f"{len(facts['tried'])} other settings were tried\n"
        )
    if "speed" in facts:
        speed = facts["speed"]
        screen.write(
            f"{speed['method']}: {speed['tokens_per_s']:.1f} tokens/s at {speed['tau']:.2f} tokens a round; "
            f"plain decoding: {speed['plain_tokens_per_s']:.1f} tokens/s\n"
        )
    for finding in report.findings:
        screen.write("\n" + _told(finding))
    counts = [(report.count("error"), "error"), (report.count("warning"), "warning"), (report.count("note"), "note")]
    screen.write("\n" + ", ".join(f"{n} {word}{'s' * (n != 1)}" for n, word in counts) + "\n")


def _told(finding: Finding) -> str:
    lines = [
        f"{finding.severity.upper()} {finding.name}: {finding.what}",
        f"  how it is known: {finding.known}",
        f"  what to do: {finding.remedy}",
    ]
    return "".join(
        textwrap.fill(line, _COLUMNS, subsequent_indent="    ", break_long_words=False) + "\n" for line in lines
    )
