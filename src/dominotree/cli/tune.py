"""`dominotree tune`: the fastest way to decode on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from dominotree.cli import common


def tune(
    target: common.Target = None,
    drafter: common.DrafterName = None,
    dtype: common.Dtype = "auto",
    device: common.Device = "auto",
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="Prompts a setup is measured on.")] = 6,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=8, help="Tokens of each answer.")] = 64,
) -> None:
    """Measure threads, methods, budgets and candidate widths, and say which to use; the output is the same with all."""
    from rich.console import Console
    from rich.table import Table

    from dominotree.bench.datasets import load_sets
    from dominotree.pair import load
    from dominotree.tune import tune as measure

    pair = load(target=target, drafter=drafter, dtype=dtype, device=device)
    sets = load_sets(["builtin"])
    texts = [turns[0] for group in zip(*(one.samples for one in sets), strict=False) for turns in group][:prompts]
    console, notes = Console(), Console(stderr=True)
    with notes.status("measuring") as status:
        advice = measure(
            pair, texts, max_new_tokens=max_new_tokens, tick=lambda what: status.update(f"measuring {what}")
        )
    table = Table("setup", "tokens/s", "tokens a round", "speedup")
    for one in advice.measured:
        table.add_row(str(one.setup), f"{one.speed:.1f}", f"{one.tau:.2f}", f"{one.speed / advice.plain.speed:.2f}")
    console.print(table)
    if advice.best.setup.drafting.method == "ar":
        console.print("Plain decoding is the fastest here: drafting costs more than it gains. Use --method ar.")
    else:
        console.print(f"Fastest: {advice.best.setup}, {advice.speedup:.2f} times plain decoding. Use:")
        console.print(f"  {advice.flags()}")
