"""`dominotree train`: collect a target's answers, fit a drafter to them, measure it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, help="Make a drafter for a target of your own.")

Target = Annotated[str, typer.Option("--target", "-t", help="Target: a named pair, a folder or a hub id.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; default: PyTorch's own choice.")]


@app.command()
def fit(
    target: Target,
    data: Annotated[Path, typer.Option(help="Corpus folder, as made by `collect`.")],
    out: Annotated[Path, typer.Option(help="Run folder: state, log and drafter; a run found here goes on.")],
    config: Annotated[
        Path | None, typer.Option(help="TOML file with tables [drafter] and [fit]; see docs/train.md.")
    ] = None,
    init_from: Annotated[
        Path | None, typer.Option(help="Drafter folder to start from, shape included.")
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
    bf16: Annotated[bool, typer.Option(help="Compute in bf16; weights and their sums stay fp32.")] = True,
    threads: Threads = None,
    export: Annotated[
        bool, typer.Option("--export", help="Train nothing: write the drafter of the run's last state.")
    ] = False,
) -> None:
    """Train a Domino or DFlash drafter; stop it at any time, the same command goes on."""
    import torch

    from dominotree.hub import resolve_target
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
    settings = FitSettings.from_dict(fit_values)
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
        device=_device(device),
        bf16=bf16,
        held_out=held_out,
        cache=cache,
        on_cache=lambda done, total, rate: typer.echo(
            f"features {done}/{total} sequences, {rate:.0f} tokens/s"
        ),
        on_log=on_log,
    )
    for reason, count in trainer.cache.corpus.skipped.items():
        typer.echo(f"skipped {count} sequences: {reason}", err=True)
    arithmetic = "bfloat16" if bf16 else "float32"
    typer.echo(
        f"{trainer.cache.ready} sequences, weights float32, arithmetic {arithmetic}, step {trainer.step}"
    )
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
        raise InvalidRequest(
            f"Training config {file} has {unknown[0]!r}, expected tables [drafter] and [fit]."
        )
    return dict(values.get("drafter", {})), dict(values.get("fit", {}))
