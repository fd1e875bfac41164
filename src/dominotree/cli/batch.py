"""`dominotree batch`: answers to a file of prompts, on this machine or on a Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dominotree import __version__
from dominotree.cli import common
from dominotree.cli.common import ModelOptions, given, load_pair, needs_extra, sampling_params, screen
from dominotree.cli.progress import progress_bar
from dominotree.errors import InvalidRequest

if TYPE_CHECKING:
    from dominotree.batch import Job, Line, Record, Results
    from dominotree.methods import Drafting
    from dominotree.pair import Pair

EXIT_LINES_FAILED = 3


def batch(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="INPUT",
            help='JSONL, lines {"prompt": "..."} or {"messages": [...]}, with an id and sampling options if need be.',
        ),
    ],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="JSONL of the records, in the input's order.")],
    target: common.Target = None,
    drafter: common.DrafterName = None,
    dflash_drafter: common.DFlashDrafter = None,
    method: common.MethodName = None,
    budget: common.Budget = None,
    candidates: common.Candidates = None,
    node_topk: common.NodeTopk = None,
    noise_aware: common.NoiseAware = False,
    temperature: common.Temperature = None,
    top_p: common.TopP = None,
    top_k: common.TopK = None,
    min_p: common.MinP = None,
    repetition_penalty: common.RepetitionPenalty = None,
    presence_penalty: common.PresencePenalty = None,
    frequency_penalty: common.FrequencyPenalty = None,
    logit_bias: common.LogitBias = None,
    stop: common.Stop = None,
    ignore_eos: common.IgnoreEos = False,
    seed: Annotated[int, typer.Option("--seed", help="Every line's own seed is made of this and its number.")] = 0,
    max_new_tokens: common.MaxNewTokens = None,
    context: common.Context = None,
    system: common.System = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue prompts themselves, no chat template.")] = False,
    dtype: common.Dtype = "auto",
    device: common.Device = "auto",
    threads: common.Threads = None,
    exact: common.Exact = None,
    max_batch: Annotated[int, typer.Option("--max-batch", min=1, help="Sequences decoded at once, a worker.")] = 8,
    ray: Annotated[bool, typer.Option("--ray", help="Spread the prompts over a Ray cluster.")] = False,
    ray_address: Annotated[
        str | None, typer.Option("--ray-address", help="Cluster to join; auto: the one here.  [default: a fresh one]")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Copies of the model in the cluster.  [default: 1]")
    ] = None,
) -> None:
    """Answer every line of INPUT. Stop it at any time, the same command goes on; OUTPUT appears when all is done.

    A line that cannot run becomes a record with an error, and the exit code is 3.
    """
    for name, value in (("ray_address", ray_address), ("workers", workers)):
        if value is not None and not ray:
            raise InvalidRequest(f"{common.flag(name)} has no effect without --ray; leave it out or add --ray")
    form = common.prompt_form(raw=raw, system=system)
    common.show_notices()
    from dominotree.batch import Job, Results, digest, read_lines

    sampling = sampling_params(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=logit_bias,
        stop=stop,
        ignore_eos=ignore_eos,
        max_new_tokens=max_new_tokens,
    )
    common.note_idle_noise(noise_aware, sampling)
    job = Job(sampling, seed, form)
    model = ModelOptions(target, drafter, dflash_drafter, dtype, device, threads, context, exact)
    drafting = given(method=method, budget=budget, candidates=candidates, node_topk=node_topk, noise_aware=noise_aware)
    total = sum(1 for _ in read_lines(source))
    if not total:
        raise InvalidRequest(f"{source} has no lines; one JSON object a prompt is expected")
    load = partial(_load, model, drafting, max_batch)
    with Results(output, _started_with(digest(source), job, model, drafting)) as results:

        def todo() -> Iterator[Line]:
            return (line for line in read_lines(source) if line.number not in results)

        if ray:
            came = _spread(load, todo(), job, max_batch, ray_address, workers or 1, device)
        else:
            came = _here(load, todo, job)
        try:
            _collect(came, results, total)
        except KeyboardInterrupt:
            screen.note(f"What is done is in {results.part}; the same command goes on from there.")
            raise
        if len(results) != total:
            raise InvalidRequest(
                f"{source} had {total} prompts and {len(results)} of them have a record; it must not change meanwhile. "
                f"What is done is in {results.part}"
            )
        results.finish()
        failed = results.failed
    screen.note(f"{total} records, {failed} of them errors: {output}")
    if failed:
        raise typer.Exit(EXIT_LINES_FAILED)


def _started_with(input_digest: str, job: Job, model: ModelOptions, drafting: dict[str, Any]) -> dict[str, Any]:
    """What the answers depend on: not how many are decoded at once, nor on how many threads or machines."""
    from dominotree.batch import OPTIONS

    return {
        "input": input_digest,
        "version": __version__,
        **{name: getattr(job.sampling, name) for name in OPTIONS},
        "seed": job.seed,
        "raw": job.form.get("raw", False),
        "system": job.form.get("system"),
        **{name: value for name, value in vars(model).items() if name != "threads"},
        **{name: drafting.get(name) for name in ("method", "budget", "candidates", "node_topk", "noise_aware")},
    }


def _load(model: ModelOptions, drafting: dict[str, Any], max_batch: int) -> tuple[Pair, Drafting]:
    pair, filled = load_pair(model, drafting)
    pair.max_batch = max_batch
    return pair, pair.drafting(**filled)


def _here(load: Callable[[], tuple[Pair, Drafting]], todo: Callable[[], Iterable[Line]], job: Job) -> Iterator[Record]:
    """Records from this process; the lines are gone through once more to see how much room they need."""
    from dominotree.batch import records, room

    if not any(True for _ in todo()):
        return
    pair, drafting = load()
    yield from records(pair, todo(), job, drafting, room(pair, todo(), job, drafting))


def _spread(
    load: Callable[[], tuple[Pair, Drafting]],
    lines: Iterable[Line],
    job: Job,
    max_batch: int,
    address: str | None,
    workers: int,
    device: str,
) -> Iterator[Record]:
    with needs_extra("ray", "--ray"):
        from dominotree.engines.ray_batch import spread
    return spread(load, lines, job, max_batch=max_batch, workers=workers, address=address, device=device)


def _collect(came: Iterator[Record], results: Results, total: int) -> None:
    """Writes records as they come."""
    with progress_bar("prompts") as show:
        show(len(results), total, "")
        before, started = results.new_tokens, time.monotonic()
        for record in came:
            results.write(record)
            speed = (results.new_tokens - before) / (time.monotonic() - started)
            show(len(results), total, f"{speed:.1f} tokens/s")
