"""`dominotree plan`: what a fleet would do, simulated from a profile and recorded acceptance."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dominotree.cli import common
from dominotree.cli.common import comma_list, progress_line, screen
from dominotree.errors import InvalidRequest

if TYPE_CHECKING:
    from dominotree.costs import CostModel
    from dominotree.plan import Acceptance, Load


def plan(
    records: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folder of a `dominotree bench` run, or its records.")
    ],
    profile: Annotated[
        Path | None,
        typer.Option("--profile", help="What `dominotree profile` has kept.  [default: the one that fits the method]"),
    ] = None,
    method: Annotated[
        str | None, typer.Option("--method", help="Whose records count.  [default: lookuptree, else what is recorded]")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", help="Whose records count, where there are several.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", help="Most nodes of a tree, with commas; 0: plain.  [default: all recorded, and 0]"),
    ] = None,
    rate: Annotated[
        str | None, typer.Option("--rate", help="Requests a second that arrive at the fleet, with commas.")
    ] = None,
    clients: Annotated[
        str | None, typer.Option("--clients", help="In place of --rate: clients that ask one after another.")
    ] = None,
    replicas: Annotated[int, typer.Option("--replicas", help="Machines.")] = 1,
    max_batch: Annotated[int, typer.Option("--max-batch", help="Sequences that a machine decodes at once.")] = 8,
    max_rows: Annotated[
        int | None,
        typer.Option("--max-rows", help="Most rows of a pass that several share.  [default: by the profile]"),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", metavar="N|LEAST-MOST", help="Tokens of prompts.  [default: as recorded]"),
    ] = None,
    answer: Annotated[
        str | None,
        typer.Option("--answer", metavar="N|LEAST-MOST", help="Tokens of answers.  [default: as recorded]"),
    ] = None,
    requests: Annotated[int, typer.Option("--requests", help="Requests to simulate, at every load.")] = 300,
    price: Annotated[float | None, typer.Option("--price", min=0, help="Of a machine's hour, in any currency.")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of arrivals, prompts and lengths.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; times in seconds.")] = False,
) -> None:
    """Simulate a fleet at several loads and budgets: speed, waiting times, cost, and where trees stop paying."""
    if (rate is None) == (clients is None):
        raise InvalidRequest("give --rate, such as 0.5,1,2, or --clients, such as 1,4,16, and not both")
    with common.needs_extra("plan", "plan"):
        from dominotree.plan import ASSUMPTIONS, Acceptance, Fleet, Load, simulate
    from dominotree.bench.records import read_records

    common_load: dict[str, Any] = {
        "requests": requests,
        "prompt": _span("prompt", prompt),
        "answer": _span("answer", answer),
        "seed": seed,
    }
    loads = [Load(rate=each, **common_load) for each in comma_list("rate", rate, float)] if rate is not None else []
    if clients is not None:
        loads = [Load(clients=each, **common_load) for each in comma_list("clients", clients, int)]
    recorded = read_records(records).records
    if method is None:
        trees = {record.method for record in recorded if record.budget and _drafts(record.method)}
        method = next((name for name in ("lookuptree", "dominotree", *sorted(trees)) if name in trees), "lookuptree")
    if not _drafts(method):
        raise InvalidRequest(f"--method is {method}, which has no drafter; a method that drafts is expected")
    costs = _profile(profile, method)
    acceptance = Acceptance.of(recorded, method, temperature)
    budgets = list(acceptance.budgets) if budget is None else comma_list("budget", budget, int)
    found = []
    with progress_line() as tick:
        for load in loads:
            for nodes in budgets:
                tick(f"simulating: {_name(load)}, budget {nodes}")
                fleet = Fleet(costs, acceptance, nodes, replicas, max_batch, max_rows)
                found.append(simulate(fleet, load).summary(price))
    verdict = _verdict(found)
    if as_json:
        told = {"profile": costs.key, "fleet": {"replicas": replicas, "max_batch": max_batch, "max_rows": max_rows}}
        text = {**told, "method": method, "results": found, "verdict": verdict, "assumptions": list(ASSUMPTIONS)}
        screen.write(json.dumps(text) + "\n")
        return
    _show(found, price)
    screen.write(verdict + "\n\n" + _basis(costs, acceptance, method) + "\nAssumed:\n")
    for assumption in ASSUMPTIONS:
        screen.write(f"- {assumption}\n")


def _span(name: str, text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    least, _, most = text.partition("-")
    try:
        return int(least), int(most or least)
    except ValueError:
        raise InvalidRequest(f"{common.flag(name)} is {text!r}; N or LEAST-MOST is expected, such as 100-400") from None


def _drafts(method: str) -> bool:
    from dominotree.methods import METHODS

    return method not in METHODS or METHODS[method].drafts  # unknown ones are others' records


def _profile(path: Path | None, method: str) -> CostModel:
    """The profile at `path`, else the only one here that was measured with a drafter for the method."""
    from dominotree.costs import CostModel
    from dominotree.hub import cache_dir
    from dominotree.methods import METHODS

    if path is not None:
        return CostModel.load(path)
    kind = METHODS.get(method)
    domino, needs_head = kind is None or kind.drafter == "domino", kind is None or kind.needs_head
    kept: dict[Path, CostModel] = {}
    broken: list[InvalidRequest] = []
    for file in sorted((cache_dir() / "profiles").glob("*.json")):
        try:
            kept[file] = CostModel.load(file)
        except InvalidRequest as error:  # of an earlier version, perhaps of another pair
            broken.append(error)
    if broken and not kept:
        raise broken[0]
    fitting = {file: costs for file, costs in kept.items() if costs.has_head is domino}
    if not fitting and not needs_head:  # a Domino drafter may serve a DFlash method as well
        fitting = kept
    if len(fitting) == 1:
        return next(iter(fitting.values()))
    if kept:
        names = "".join(f"\n  {file} ({costs.said})" for file, costs in (fitting or kept).items())
        raise InvalidRequest(f"there are {len(kept)} profiles here; name one with --profile:{names}")
    raise InvalidRequest("no machine has been profiled here; run `dominotree profile`, or name its file with --profile")


def _name(load: Load) -> str:
    return f"{load.rate:g} a second" if load.rate is not None else _told(load.clients or 0, "client")


def _load_of(result: dict[str, Any]) -> float:
    return float(result["clients"] if result["rate"] is None else result["rate"])


def _verdict(results: Sequence[dict[str, Any]]) -> str:
    """Up to which load trees answer sooner than plain decoding."""
    if not {result["budget"] for result in results} - {0}:
        return "No trees were simulated."
    if all(result["budget"] for result in results):
        return "Plain decoding was not simulated (budget 0), so whether trees pay is not known."
    unit = "client" if results[0]["rate"] is None else "request"
    pays: list[float] = []
    not_pays: list[float] = []
    for load, group in groupby(sorted(results, key=_load_of), key=_load_of):
        best = min(group, key=lambda result: result["request_s"])
        (pays if best["budget"] else not_pays).append(load)
    if not not_pays:
        return f"Trees answer sooner than plain decoding at every load here, up to {_told(max(pays), unit)}."
    if not pays:
        return f"Plain decoding answers sooner than trees at every load here, from {_told(min(not_pays), unit)} on."
    if max(pays) < min(not_pays):
        return f"Trees answer sooner up to {_told(max(pays), unit)}; from {min(not_pays):g} on plain decoding does."
    listed = "".join(f"{load:g}, " for load in not_pays[:-1]) + _told(not_pays[-1], unit)
    return f"Plain decoding answers sooner at {listed}, trees at the other loads."


def _told(count: float, unit: str) -> str:
    return f"{count:g} {unit}{'' if count == 1 else 's'}{' a second' if unit == 'request' else ''}"


def _basis(costs: CostModel, acceptance: Acceptance, method: str) -> str:
    key = costs.key
    encoding = (
        "as verifying" if acceptance.prefill_ms is None else f"{acceptance.prefill_ms:.2f} ms a token, as recorded"
    )
    return (
        f"Profile: {key['target']} in {key['dtype']} on {key['device']}, {key['processor']}, {key['threads']} threads. "
        f"Records: {len(acceptance.prompts)} prompts, method {method}. Prompts are encoded at {encoding}."
    )


def _show(results: Sequence[dict[str, Any]], price: float | None) -> None:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE)
    load = "clients" if results[0]["rate"] is None else "requests/s"
    heads = [
        load,
        "budget",
        "tokens/s",
        "first token ms",
        "p95",
        "a token ms",
        "p95",
        "request s",
        "busy",
        "nodes",
        "tau",
    ]
    for name in [*heads, *(["per million"] if price is not None else [])]:
        table.add_column(name, justify="right")
    for one in results:
        same = [other["request_s"] for other in results if _load_of(other) == _load_of(one)]
        best = len(same) > 1 and one["request_s"] == min(same)
        cells = [
            f"{_load_of(one):g}",
            str(one["budget"]),
            f"{one['tokens_per_s']:.1f}",
            f"{1000 * one['first_token_s']:.0f}",
            f"{1000 * one['first_token_p95_s']:.0f}",
            f"{1000 * one['per_token_s']:.1f}",
            f"{1000 * one['per_token_p95_s']:.1f}",
            f"{one['request_s']:.2f}",
            f"{100 * one['busy']:.0f}%",
            f"{one['nodes']:.1f}",
            f"{one['tau']:.2f}",
            *([f"{one['cost_per_million']:.2f}"] if price is not None else []),
        ]
        table.add_row(*cells, style="bold" if best else None)
    screen.table(table)
