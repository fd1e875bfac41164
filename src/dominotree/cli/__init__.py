"""The `dominotree` command, one file a subcommand. None imports torch before it runs: `--help` is instant."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from io import TextIOWrapper
from typing import Annotated

import typer

from dominotree import __version__
from dominotree.cli import (
    audit,
    batch,
    bench,
    chat,
    demo,
    doctor,
    generate,
    inspect,
    methods,
    plan,
    profile,
    report,
    serve,
    trace,
    tune,
)
from dominotree.cli.common import OneLineErrors

app = typer.Typer(
    cls=OneLineErrors,
    add_completion=False,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"dominotree {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Decode a language model faster with a tree of drafted tokens, and get the same tokens as without."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("batch")(batch.batch)
app.command("trace")(trace.trace)
app.command("serve")(serve.serve)
app.command("methods")(methods.methods)
app.command("profile")(profile.profile)
app.command("tune")(tune.tune)
app.command("plan")(plan.plan)
app.command("inspect")(inspect.inspect)
app.command("doctor")(doctor.doctor)
app.command("audit")(audit.audit)
app.command("bench")(bench.bench)
app.command("report")(report.report)
if find_spec("dominotree.cli.train") is not None:
    app.add_typer(import_module("dominotree.cli.train").app, name="train")
app.command("demo", hidden=True)(demo.demo)


def _spin_less() -> None:
    """Lets threads that wait give their processor back after some microseconds, where the user has not said otherwise.

    GNU OpenMP's default is milliseconds. On a machine with other work that makes a pass many times slower; on a quiet
    one, less costs nothing. It is read once, when torch is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def main() -> None:
    """Entry point of the `dominotree` script."""
    _spin_less()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where a terminal lacks a character, "?" and go on
    app()
