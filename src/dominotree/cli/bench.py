"""`dominotree bench`: speed and acceptance of several methods over several sets, outputs compared throughout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dominotree.cli import common
from dominotree.cli.common import ModelOptions, comma_list, screen
from dominotree.cli.progress import progress_bar
from dominotree.errors import InvalidRequest

if TYPE_CHECKING:
    from dominotree.bench.runner import Outcome, Plan
    from dominotree.pair import Pair

DEFAULT_METHODS = "ar,domino,dominotree,lookuptree"
DEFAULT_NEW_TOKENS = 256
EXIT_NOT_LOSSLESS = 3

_NOISE = {"off": (False,), "on": (True,), "both": (False, True)}
_MOST_LISTED = 20


def bench(
    target: common.Target = None,
    drafter: common.DrafterName = None,
    dflash_drafter: common.DFlashDrafter = None,
    methods: Annotated[
        str, typer.Option("--methods", help="See `dominotree methods`; ar is what others are compared with.")
    ] = DEFAULT_METHODS,
    sets: Annotated[
        str | None,
        typer.Option(
            "--sets",
            help="gsm8k, math500, aime25, humaneval, mbpp, livecodebench, mt-bench, alpaca, or builtin."
            "  [default: builtin, or all files of --data]",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", help='Folder of sets of your own: NAME.jsonl, lines {"turns": [...]}.'),
    ] = None,
    budget: Annotated[str, typer.Option("--budget", help="Most nodes of a tree.")] = "16",
    candidates: Annotated[str, typer.Option("--candidates", help="Tokens scored per depth; 0: all.")] = "64",
    temperature: Annotated[str, typer.Option("--temperature", help="0: always the likeliest token.")] = "0",
    noise_aware: Annotated[
        str, typer.Option("--noise-aware", help="Draft with a look at the draws to come: off, on or both.")
    ] = "off",
    ablations: Annotated[
        str | None,
        typer.Option("--ablations", help="Also trees by the reference-builder, or from sampled-candidates."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", help="Conversations a set.  [default: all; of a set of the hub 50]")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", help="Most tokens of an answer; the protocol has 2048.")
    ] = DEFAULT_NEW_TOKENS,
    seed: Annotated[int, typer.Option("--seed", help="For draws and for the order of methods.")] = 0,
    dtype: common.Dtype = "auto",
    device: common.Device = "auto",
    threads: common.Threads = None,
    context: common.Context = None,
    exact: common.Exact = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the run; a run found there goes on.")] = Path(
        "bench"
    ),
    run: Annotated[
        str | None, typer.Option("--run", help="Name of the run in tables.  [default: the folder's]")
    ] = None,
) -> None:
    """Measure methods over prompts; lists take commas. Every answer is compared with plain decoding's.

    Stop it at any time, the same command goes on. Exits with 3 where an answer differs from plain decoding's
    beyond rounding.
    """
    common.show_notices()
    from dominotree.bench import runner
    from dominotree.bench.datasets import load_sets

    arguments: dict[str, Any] = {
        "target": target,
        "drafter": drafter,
        "dflash_drafter": dflash_drafter,
        "methods": comma_list("methods", methods, str),
        "sets": None if sets is None else comma_list("sets", sets, str),
        "data": None if data is None else str(data),
        "budget": comma_list("budget", budget, int),
        "candidates": comma_list("candidates", candidates, int),
        "temperature": comma_list("temperature", temperature, float),
        "noise_aware": noise_aware,
        "ablations": [] if ablations is None else comma_list("ablations", ablations, str),
        "limit": limit,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "dtype": dtype,
        "device": device,
        "threads": threads,
        "context": context,
        "exact": exact,
    }
    if noise_aware not in _NOISE:
        raise InvalidRequest(f"--noise-aware is {noise_aware!r}; {', '.join(_NOISE)} is expected")
    model = ModelOptions(target, drafter, dflash_drafter, dtype, device, threads, context, exact)
    plan = runner.Plan(
        runner.setups(
            arguments["methods"],
            arguments["budget"],
            arguments["candidates"],
            _NOISE[noise_aware],
            arguments["ablations"],
        ),
        tuple(arguments["temperature"]),
        max_new_tokens,
        seed,
        run=out.resolve().name if run is None else run,
        model=_model_name(target),
    )
    prompts = load_sets(arguments["sets"], data=data, limit=limit)
    pair = _load(model, plan)
    runner.check_drafters(pair, plan)
    if all(setup.method != "ar" for setup in plan.setups):
        screen.note("Note: ar is not among the methods: no speedups, and nothing to compare outputs with")
    meta = runner.describe(pair, plan, prompts, arguments, _drafters(pair, model, plan))
    try:
        with progress_bar("turns") as show:
            outcome = runner.run(pair, plan, prompts, out, meta, lambda p: show(p.done, p.total, p.doing))
    except KeyboardInterrupt:
        screen.note(f"What is done is in {out}; the same command goes on from there.")
        raise
    _show(outcome)
    if outcome.bugs:
        raise typer.Exit(EXIT_NOT_LOSSLESS)


def _model_name(target: str | None) -> str:
    from dominotree.hub import DEFAULT_PAIR

    if target is None:
        return DEFAULT_PAIR
    return Path(target).resolve().name if Path(target).is_dir() else target


def _load(model: ModelOptions, plan: Plan) -> Pair:
    from dominotree.pair import load

    kinds = {setup.drafting.kind.drafter for setup in plan.setups}
    drafter, dflash_drafter = model.drafter, model.dflash_drafter
    if kinds == {"none"}:
        drafter = dflash_drafter = "none"
    elif "domino" not in kinds and drafter is not None and dflash_drafter is None:
        dflash_drafter = "none"  # the one that was named shall be the one that drafts
    return load(
        target=model.target,
        drafter=drafter,
        dflash_drafter=dflash_drafter,
        dtype=model.dtype,
        device=model.device,
        threads=model.threads,
        context=model.context,
        exact=model.exact,
    )


def _drafters(pair: Pair, model: ModelOptions, plan: Plan) -> dict[str, str | None]:
    """Names of the drafters in use; one that was not named is the pair's own."""
    names = {
        "domino": None if pair.drafter is None else model.drafter or f"{pair.name}-domino",
        "dflash": None,
    }
    if any(setup.drafting.kind.drafter == "dflash" for setup in plan.setups):
        own = pair.dflash_drafter is not None
        names["dflash"] = (model.dflash_drafter or f"{pair.name}-dflash") if own else model.drafter
    return names


def _show(outcome: Outcome) -> None:
    from dominotree.bench.runner import RECORDS_FILE, describe_difference

    for name, count, what in (
        ("differences", len(outcome.differences), "differences from plain decoding"),
        ("skipped", len(outcome.skipped), "turns skipped"),
    ):
        if count:
            screen.note(f"{count} {what}; see {outcome.checks / f'{name}.jsonl'}")
    for entry in outcome.differences[:_MOST_LISTED] if not outcome.bugs else outcome.bugs[:_MOST_LISTED]:
        screen.note(describe_difference(entry))
    if outcome.ended_at_once:
        screen.note(f"{outcome.ended_at_once} answers ended with their first token; these have no speed")
    if outcome.records:
        _show_tables(outcome.folder / RECORDS_FILE)
    earlier = f", {outcome.resumed} of them from before" if outcome.resumed else ""
    screen.write(f"{outcome.records} records{earlier}: {outcome.folder / RECORDS_FILE}\n")
    if outcome.compared and outcome.records:
        screen.write(verdict(len(outcome.bugs), len(outcome.differences) - len(outcome.bugs)) + "\n")
    if outcome.records:
        screen.write(f"dominotree report {outcome.folder} makes tables, figures and a page of it\n")


def verdict(bugs: int, ties: int) -> str:
    """What the numbers of answers that differ beyond rounding, and within it, come to."""
    if bugs:
        return f"NOT lossless: {bugs} answers differ from plain decoding's beyond rounding"
    if ties:
        return f"lossless but for rounding: {ties} answers part from plain decoding's at a near-tie"
    return "lossless: every answer is plain decoding's, token for token"


def _show_tables(records: Path) -> None:
    """Speedup / tau per set, a table for every temperature."""
    from dominotree.bench.records import read_records
    from dominotree.bench.statistics import cells, collect
    from dominotree.bench.tables import speed_table

    found = cells(collect(read_records([records]).records))
    for heat in sorted({cell.temperature for cell in found}):
        here = [cell for cell in found if cell.temperature == heat]
        _print(speed_table(here, "speed", f"{here[0].model}, T={heat:g}"))


def _print(table: Any) -> None:
    from rich.box import SIMPLE
    from rich.table import Table as RichTable

    shown = RichTable(box=SIMPLE, title=table.caption, title_style="", title_justify="left")
    for place, name in enumerate(table.head):
        shown.add_column(name, justify="left" if place < table.labels else "right")
    for i, row in enumerate(table.rows):
        shown.add_row(*_strong(row, [(i, j) in table.strong for j in range(len(row))]))
    screen.table(shown)


def _strong(row: Sequence[str], marked: Sequence[bool]) -> list[str]:
    return [f"[bold]{text}[/]" if bold else text for text, bold in zip(row, marked, strict=True)]
