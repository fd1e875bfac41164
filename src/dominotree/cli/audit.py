"""`dominotree audit`: whether a method gives the tokens of plain decoding here, and if not, why."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dominotree.cli import common
from dominotree.cli.bench import EXIT_NOT_LOSSLESS, verdict
from dominotree.cli.common import ModelOptions, comma_list, given, load_pair, progress_line, screen
from dominotree.errors import InvalidRequest

if TYPE_CHECKING:
    from dominotree.bench.audit import Comparison, Parting

_SHOWN = 40


def audit(
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT]...", help="Prompts; without any, built-in ones.")
    ] = None,
    target: common.Target = None,
    drafter: common.DrafterName = None,
    dflash_drafter: common.DFlashDrafter = None,
    method: common.MethodName = None,
    budget: common.Budget = None,
    candidates: common.Candidates = None,
    node_topk: common.NodeTopk = None,
    noise_aware: common.NoiseAware = False,
    temperature: Annotated[str, typer.Option("--temperature", help="Temperatures, with commas between.")] = "0,1",
    seed: Annotated[int, typer.Option("--seed", help="For the draws, the same for both.")] = 0,
    data: Annotated[
        Path | None,
        typer.Option("--data", help='Prompts from a file: JSONL, lines {"turns": [...]}; first turns count.'),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, help="Prompts of a set.  [default: 2 of each built-in one, all of --data]"),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Most tokens of an answer.")] = 64,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text itself, no chat template.")] = False,
    dtype: common.Dtype = "auto",
    device: common.Device = "auto",
    threads: common.Threads = None,
    context: common.Context = None,
    exact: common.Exact = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, with every difference.")] = False,
) -> None:
    """Decode prompts plainly and with a method, in fp32 and in your dtype, and compare every token.

    A difference is a tie where rounding explains it, and a bug otherwise; exits with 3 where there is a bug.
    """
    if method == "ar":
        raise InvalidRequest("there is nothing to compare method ar with; name a method that drafts")
    heats = comma_list("temperature", temperature, float)
    texts = _texts(prompts or [], data, limit)
    from dominotree.bench.audit import audit as compare
    from dominotree.sampling import SamplingParams

    for heat in heats:
        SamplingParams(temperature=heat, seed=seed, max_new_tokens=max_new_tokens)
    wanted = given(method=method, budget=budget, candidates=candidates, node_topk=node_topk, noise_aware=noise_aware)
    found: list[Comparison] = []
    with progress_line() as tick:
        for name in _dtypes(dtype, device):
            tick(f"loading in {name}")
            model = ModelOptions(target, drafter, dflash_drafter, name, device, threads, context, exact)
            pair, drafting = load_pair(model, wanted)
            if drafting["method"] == "ar":
                raise InvalidRequest("an audit needs a drafter; name one with --drafter, or use --method lookup")
            ids = [pair.prompt_ids(text, raw=raw) for text in texts]
            found += compare(
                pair, ids, pair.drafting(**drafting), heats, seed=seed, max_new_tokens=max_new_tokens, tick=tick
            )
            method = drafting["method"]
    bugs, ties = sum(len(one.bugs) for one in found), sum(len(one.ties) for one in found)
    if as_json:
        comparisons = [one.to_json() for one in found]
        record = {"method": method, "lossless": not bugs, "ties": ties, "bugs": bugs, "comparisons": comparisons}
        screen.write(json.dumps(record) + "\n")
    else:
        _show(found, texts)
        screen.write(verdict(bugs, ties) + "\n")
    if bugs:
        raise typer.Exit(EXIT_NOT_LOSSLESS)


def _texts(prompts: Sequence[str], data: Path | None, limit: int | None) -> list[str]:
    """First turns of what was named: arguments, a file, or the built-in sets."""
    from dominotree.bench.datasets import BUILTIN, load_sets, read_set

    if prompts and data is not None:
        raise InvalidRequest("--data has no effect beside prompts; leave one of them out")
    for prompt in prompts:
        common.check_text("a prompt", prompt)
        if not prompt.strip():
            raise InvalidRequest("a prompt is empty; give some text")
    if prompts:
        return list(prompts)[:limit]
    sets = load_sets([BUILTIN], limit=limit or 2) if data is None else [read_set(data).first(limit)]
    return [turns[0] for one in sets for turns in one.samples]


def _dtypes(dtype: str, device: str) -> list[str]:
    """fp32, which rounds least, and what the user decodes in."""
    from dominotree.machine import parse_device, parse_dtype

    own = str(parse_dtype(dtype, parse_device(device))).removeprefix("torch.")
    return list(dict.fromkeys(["float32", own]))


def _show(found: Sequence[Comparison], texts: Sequence[str]) -> None:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE)
    table.add_column("dtype")
    for name in ("temperature", "prompts", "tokens", "identical", "ties", "bugs", "row-invariant"):
        table.add_column(name, justify="right")
    for one in found:
        counts = (one.prompts, one.tokens, one.identical, len(one.ties), len(one.bugs))
        invariant = "yes" if one.row_invariant else "no"
        table.add_row(one.dtype, f"{one.temperature:g}", *map(str, counts), invariant)
    screen.table(table)
    for one in found:
        for parting in one.partings:
            screen.write(_described(one, parting, texts[parting.prompt]) + "\n")


def _described(one: Comparison, parting: Parting, text: str) -> str:
    """One line about an answer that differs."""
    d = parting.difference
    begun = common.one_line(text)
    begun = begun if len(begun) <= _SHOWN else begun[: _SHOWN - 3] + "..."
    margin = "" if d.margin is None else f", margin {d.margin:.3g}"
    tokens = f"token {d.position + 1} is {d.plain_token} plainly and {d.other_token} drafted"
    return f"{d.kind}: {one.dtype}, temperature {one.temperature:g}, {begun!r}: {tokens}{margin}: {d.reason}"
