"""`dominotree train`: collect a target's answers, fit a drafter to them, measure it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dominotree.cli import common
from dominotree.errors import InvalidRequest

if TYPE_CHECKING:
    from dominotree.generation import Stats

app = typer.Typer(no_args_is_help=True)

Target = Annotated[str, typer.Option("--target", "-t", help="Target: a named pair, a folder or a hub id.")]


@app.callback()
def train() -> None:
    """Make a drafter for a target of your own."""


@app.command()
def collect(
    target: Target,
    prompts: Annotated[
        list[str],
        typer.Option(help="JSONL file of {prompt} or {turns}, or hub:NAME[:CONFIG]:SPLIT:COLUMN; may be repeated."),
    ],
    out: Annotated[Path, typer.Option(help="Corpus folder; one found here is gone on with.")],
    drafter: Annotated[str, typer.Option(help="Drafter that speeds this up; the answers stay the same.")] = "none",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 384,
    temperatures: Annotated[str, typer.Option(help="Given to the prompts in turn.")] = "0,0.7,0,1",
    batch: Annotated[int, typer.Option(min=1, help="Conversations decoded at a time.")] = 32,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many conversations.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    device: common.Device = "auto",
    threads: common.Threads = None,
) -> None:
    """Let the target answer prompts: the corpus to fit a drafter on. Stop at any time, the same command goes
    on.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    import dominotree as dt
    from dominotree.train.collect import collect as collect_answers
    from dominotree.train.collect import read_prompts

    try:
        heats = [float(part) for part in temperatures.split(",")]
    except ValueError as error:
        raise InvalidRequest(f"--temperatures is {temperatures!r}, expected numbers such as 0,0.7,1.") from error
    conversations = [found for name in prompts for found in read_prompts(name)][:limit]
    pair = dt.load(
        target=target, drafter=drafter, dflash_drafter="none", device=device, threads=threads, max_batch=batch
    )
    columns = (
        TextColumn("{task.completed}/{task.total} conversations"),
        BarColumn(),
        TextColumn("{task.fields[rate]:.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as bar:
        task = bar.add_task("", total=len(conversations), rate=0.0)
        held, cut = collect_answers(
            pair,
            conversations,
            out,
            max_new_tokens=max_new_tokens,
            temperatures=heats,
            batch=4 * batch,  # slots stay full while the long answers of a batch end
            seed=seed,
            report=lambda done, total, rate: bar.update(task, completed=done, rate=rate),
        )
    if cut:
        typer.echo(f"skipped the rest of {cut} conversations: too long for the target's context", err=True)
    typer.echo(f"{out}: answers to {held} conversations")


@app.command("eval")
def evaluate(
    target: Target,
    drafter: Annotated[str, typer.Option(help="Drafter folder, hub id or name.")],
    prompts: Annotated[list[str], typer.Option(help="As for `collect`.")],
    methods: Annotated[str, typer.Option(help="Methods to compare.")] = "domino,dominotree",
    budget: Annotated[int, typer.Option(min=0, help="Most nodes of a tree.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 128,
    limit: Annotated[int, typer.Option(min=1, help="Prompts of each file.")] = 8,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    device: common.Device = "auto",
    threads: common.Threads = None,
) -> None:
    """Measure tau (tokens a round) by decoding first turns greedily, apart for answers that ended by
    themselves.
    """
    import dominotree as dt
    from dominotree.train.collect import read_prompts

    names = common.comma_list("methods", methods, str)
    for name in names:
        dt.Drafting(name)
    pair = dt.load(target=target, drafter=drafter, device=device, dtype=dtype, threads=threads)
    head = ("prompts", "method", "tau", "ended", "tau of these", "cut", "tau of these")
    typer.echo("{:<20} {:<12} {:>6} {:>6} {:>13} {:>4} {:>13}".format(*head))
    for file in prompts:
        conversations = read_prompts(file)[:limit]
        for method in names:
            outputs = [
                pair.generate(c.turns[0], method=method, budget=budget, max_new_tokens=max_new_tokens)
                for c in conversations
            ]
            ended = [o.stats for o in outputs if o.finish_reason == "stop"]
            cut = [o.stats for o in outputs if o.finish_reason != "stop"]
            typer.echo(
                f"{Path(file).stem:<20} {method:<12} {_tau(ended + cut):>6} {len(ended):>6} "
                f"{_tau(ended):>13} "
                f"{len(cut):>4} {_tau(cut):>13}"
            )


def _tau(answers: Sequence[Stats]) -> str:
    """The mean over answers; one that its first token ended has no round."""
    taus = [stats.mean_accepted for stats in answers if stats.rounds]
    return f"{sum(taus) / len(taus):.3f}" if taus else "-"


@app.command()
def fit(
    target: Target,
    data: Annotated[Path, typer.Option(help="Corpus folder, as made by `collect`.")],
    out: Annotated[Path, typer.Option(help="Run folder: state, log and drafter; a run found here goes on.")],
    config: Annotated[
        Path | None, typer.Option(help="TOML file with tables [drafter], [fit], [licences]; see docs/train.md.")
    ] = None,
    init_from: Annotated[
        Path | None, typer.Option(help="Drafter folder to start from, shape included; --projector none: its backbone.")
    ] = None,
    projector: Annotated[
        str | None, typer.Option(help="domino (corrects along the path) or none (plain DFlash).")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimiser steps of the whole schedule.")] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Folder for the target's hidden states; default: features in --out.")
    ] = None,
    held_out: Annotated[
        int, typer.Option(min=0, help="Sequences kept for evaluation; 0: evaluate on what is trained on.")
    ] = 60,
    device: common.Device = "auto",
    bf16: Annotated[
        bool | None,
        typer.Option(
            "--bf16/--no-bf16", help="Compute in bf16 (weights and their sums stay fp32); default: where it is fast."
        ),
    ] = None,
    threads: common.Threads = None,
    export: Annotated[
        bool,
        typer.Option("--export", help="Train nothing: write the run's last state as a drafter, to last in --out."),
    ] = False,
) -> None:
    """Train a Domino or DFlash drafter; stop it at any time, the same command goes on."""
    import torch

    from dominotree.drafters.config import DrafterConfig
    from dominotree.hub import resolve_target
    from dominotree.machine import parse_device, parse_dtype, set_threads
    from dominotree.train.data import read_corpus
    from dominotree.train.fit import FitSettings, read_state, write_drafter
    from dominotree.train.model_card import write_model_card
    from dominotree.train.prepare import DrafterShape, prepare, tensorboard_writer

    log = out / "log.csv"
    shape_values, fit_values, licences = _read_config(config)
    if export:
        run, last = read_state(out), out / "last"
        if not run:
            raise InvalidRequest(f"No training run in {out}: expected state.pt; train first.")
        write_drafter(last, DrafterConfig.from_dict(run["config"]), run["draft_tokens"], run["ema"])
        write_model_card(last, target=target, run=run, corpus=read_corpus(data), log=log, licences=licences)
        typer.echo(f"{last}: the drafter after step {run['step']}")
        return
    if projector is not None:
        shape_values["projector"] = projector
    if steps is not None:
        fit_values["steps"] = steps
    settings = FitSettings.from_dict(fit_values)
    shape = (DrafterShape.from_dict if init_from is None else DrafterShape.beside_init_from)(shape_values)
    where = parse_device(device)
    set_threads(threads)
    if bf16 is None:
        bf16 = parse_dtype("auto", where) == torch.bfloat16
    figure = "held-out tau" if held_out else "tau on what it trains on"
    write_scalars = tensorboard_writer(out / "tensorboard")

    def on_log(row: dict[str, Any]) -> None:
        write_scalars(row)
        if "tau" in row or row["step"] % 10 == 0:
            _say(row, settings.steps, figure)

    trainer = prepare(
        resolve_target(target),
        data,
        out,
        settings,
        shape,
        init_from=init_from,
        device=str(where),
        bf16=bf16,
        held_out=held_out,
        cache=cache,
        on_cache=lambda done, total, rate: typer.echo(f"features {done}/{total} sequences, {rate:.0f} tokens/s"),
        on_log=on_log,
    )
    for reason, count in trainer.cache.corpus.skipped.items():
        typer.echo(f"skipped {count} sequences: {reason}", err=True)
    arithmetic = "bfloat16" if bf16 else "float32"
    typer.echo(f"{trainer.cache.ready} sequences, weights float32, arithmetic {arithmetic}, step {trainer.step}")
    trainer.run()
    best = out / "drafter"
    run, corpus = read_state(out), trainer.cache.corpus
    write_model_card(best, target=target, run=run, corpus=corpus, log=log, licences=licences)
    typer.echo(f"{best}: {figure} {trainer.best_tau:.3f}")


def _say(row: dict[str, Any], steps: int, figure: str) -> None:
    left = row["minutes"] / row["step"] * (steps - row["step"])
    text = f"step {row['step']}/{steps}  loss {row['loss']:.3f}  {row['anchors_per_s']:.0f} anchors/s"
    if "tau" in row:
        text += f"  {figure} {row['tau']:.3f} (base {row['base_tau']:.3f})"
    typer.echo(f"{text}  {left:.0f} min left")


_TABLES = ("drafter", "fit", "licences")


def _read_config(file: Path | None) -> list[dict[str, Any]]:
    """The tables of a TOML file; empty ones for those that it lacks."""
    import tomllib

    if file is None:
        return [{} for _ in _TABLES]
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"Cannot read the training config {file} ({error}): expected TOML.") from error
    for name, value in values.items():
        if name not in _TABLES or not isinstance(value, dict):
            raise InvalidRequest(
                f"Training config {file} has {name} = {value!r:.40}, expected tables [drafter], [fit] and [licences]."
            )
    wrong = next((name for name, text in values.get("licences", {}).items() if not isinstance(text, str)), None)
    if wrong is not None:
        raise InvalidRequest(f"Training config {file} has no text as the licence of {wrong!r}, expected its name.")
    return [values.get(name, {}) for name in _TABLES]
