"""`dominotree train`: collect a target's answers, fit a drafter to them, measure it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True)

Target = Annotated[str, typer.Option("--target", "-t", help="Target: a named pair, a folder or a hub id.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; default: PyTorch's own choice.")]


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
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Let the target answer prompts: the corpus to fit a drafter on. Stop at any time, the same command goes
    on.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    import dominotree as dt
    from dominotree.errors import InvalidRequest
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
        held = collect_answers(
            pair,
            conversations,
            out,
            max_new_tokens=max_new_tokens,
            temperatures=heats,
            batch=4 * batch,  # slots stay full while the long answers of a batch end
            seed=seed,
            report=lambda done, total, rate: bar.update(task, completed=done, rate=rate),
        )
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
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Measure tau (tokens a round) by decoding first turns greedily, apart for answers that ended by
    themselves.
    """
    import dominotree as dt
    from dominotree.train.collect import read_prompts

    pair = dt.load(target=target, drafter=drafter, device=device, dtype=dtype, threads=threads)
    names = [name.strip() for name in methods.split(",")]
    head = ("prompts", "method", "tau", "ended", "tau of these", "cut", "tau of these")
    typer.echo("{:<20} {:<12} {:>6} {:>6} {:>13} {:>4} {:>13}".format(*head))
    for file in prompts:
        conversations = read_prompts(file)[:limit]
        for method in names:
            outputs = [
                pair.generate(c.turns[0], method=method, budget=budget, max_new_tokens=max_new_tokens)
                for c in conversations
            ]
            ended = [o.stats.mean_accepted for o in outputs if o.finish_reason == "stop"]
            cut = [o.stats.mean_accepted for o in outputs if o.finish_reason != "stop"]
            typer.echo(
                f"{Path(file).stem:<20} {method:<12} {_mean(ended + cut):>6} {len(ended):>6} "
                f"{_mean(ended):>13} "
                f"{len(cut):>4} {_mean(cut):>13}"
            )


def _mean(values: list[float]) -> str:
    return f"{sum(values) / len(values):.3f}" if values else "-"


@app.command()
def fit(
    target: Target,
    data: Annotated[Path, typer.Option(help="Corpus folder, as made by `collect`.")],
    out: Annotated[Path, typer.Option(help="Run folder: state, log and drafter; a run found here goes on.")],
    config: Annotated[
        Path | None, typer.Option(help="TOML file with tables [drafter] and [fit]; see docs/train.md.")
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
    held_out: Annotated[int, typer.Option(min=1, help="Sequences kept for evaluation.")] = 60,
    device: Device = "auto",
    bf16: Annotated[
        bool | None,
        typer.Option(
            "--bf16/--no-bf16", help="Compute in bf16 (weights and their sums stay fp32); default: where it is fast."
        ),
    ] = None,
    threads: Threads = None,
    export: Annotated[
        bool, typer.Option("--export", help="Train nothing: write the drafter of the run's last state.")
    ] = False,
) -> None:
    """Train a Domino or DFlash drafter; stop it at any time, the same command goes on."""
    import torch

    from dominotree.hub import resolve_target
    from dominotree.machine import cpu_has_bf16
    from dominotree.train.fit import FitSettings
    from dominotree.train.model_card import write_model_card
    from dominotree.train.prepare import DrafterShape, prepare, tensorboard_writer

    shape_values, fit_values = _read_config(config)
    if projector is not None:
        shape_values["projector"] = projector
    if steps is not None:
        fit_values["steps"] = steps
    if threads is not None:
        torch.set_num_threads(threads)
    where = _device(device)
    if bf16 is None:
        bf16 = where != "cpu" or cpu_has_bf16()
    settings = FitSettings.of_run(out) if export else FitSettings.from_dict(fit_values)
    write_scalars = tensorboard_writer(out / "tensorboard")

    def on_log(row: dict[str, Any]) -> None:
        write_scalars(row)
        if "tau" in row or row["step"] % 10 == 0:
            _say(row, settings.steps)

    trainer = prepare(
        resolve_target(target),
        data,
        out,
        settings,
        DrafterShape.from_dict(shape_values),
        init_from=init_from,
        device=where,
        bf16=bf16,
        held_out=held_out,
        cache=cache,
        fill=not export,
        on_cache=lambda done, total, rate: typer.echo(f"features {done}/{total} sequences, {rate:.0f} tokens/s"),
        on_log=on_log,
    )
    for reason, count in trainer.cache.corpus.skipped.items():
        typer.echo(f"skipped {count} sequences: {reason}", err=True)
    arithmetic = "bfloat16" if bf16 else "float32"
    typer.echo(f"{trainer.cache.ready} sequences, weights float32, arithmetic {arithmetic}, step {trainer.step}")
    if export:
        trainer.export(out / "drafter")
    else:
        trainer.run()
    write_model_card(
        out / "drafter",
        target=target,
        config=trainer.model.config,
        settings=settings,
        corpus=trainer.cache.corpus,
        log=out / "log.csv",
        started_from=None if init_from is None else str(init_from),
    )
    typer.echo(f"{out / 'drafter'}: held-out tau {trainer.best_tau:.3f}")


def _say(row: dict[str, Any], steps: int) -> None:
    left = row["minutes"] / row["step"] * (steps - row["step"])
    text = f"step {row['step']}/{steps}  loss {row['loss']:.3f}  {row['anchors_per_s']:.0f} anchors/s"
    if "tau" in row:
        text += f"  held-out tau {row['tau']:.3f} (base {row['base_tau']:.3f})"
    typer.echo(f"{text}  {left:.0f} min left")


def _device(name: str) -> str:
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def _read_config(file: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tables [drafter] and [fit] of a TOML file."""
    import tomllib

    from dominotree.errors import InvalidRequest

    if file is None:
        return {}, {}
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"Cannot read the training config {file} ({error}): expected TOML.") from error
    unknown = sorted(values.keys() - {"drafter", "fit"})
    if unknown:
        raise InvalidRequest(f"Training config {file} has {unknown[0]!r}, expected tables [drafter] and [fit].")
    return dict(values.get("drafter", {})), dict(values.get("fit", {}))
