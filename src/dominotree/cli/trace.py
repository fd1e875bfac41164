"""`dominotree trace`: one answer, and a file that shows how it was decoded."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dominotree.cli import common
from dominotree.cli.common import ModelOptions, given, load_pair, read_prompt, sampling_params, screen
from dominotree.errors import InvalidRequest
from dominotree.files import write_whole

if TYPE_CHECKING:
    from dominotree.pair import Output, Pair
    from dominotree.sampling import SamplingParams
    from dominotree.trace import Json

_TITLE, _HEAD = b"<title>dominotree:", 1024
"""By which a file is known to be a trace, and how far into it that stands."""


def trace(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT|-", help="The prompt; - reads it from standard input.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The HTML file to write; it needs no network.")] = Path(
        "trace.html"
    ),
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
    ignore_eos: common.IgnoreEos = False,
    seed: common.Seed = None,
    max_new_tokens: common.MaxNewTokens = None,
    context: common.Context = None,
    system: common.System = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text itself, no chat template.")] = False,
    dtype: common.Dtype = "auto",
    device: common.Device = "auto",
    threads: common.Threads = None,
    exact: common.Exact = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Decode plainly as well; the file then replays both on one clock.")
    ] = False,
) -> None:
    """Answer a prompt and write what the decoder did: every round's tree, what was accepted, and how long it took."""
    text = read_prompt(prompt, raw=raw)
    form = common.prompt_form(raw=raw, system=system)
    common.check_compare(compare, method)
    _check_place(out)
    sampling = sampling_params(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        ignore_eos=ignore_eos,
        seed=seed,
        max_new_tokens=max_new_tokens,
    )
    model = ModelOptions(target, drafter, dflash_drafter, dtype, device, threads, context, exact)
    drafting = given(method=method, budget=budget, candidates=candidates, node_topk=node_topk, noise_aware=noise_aware)
    pair, drafting = load_pair(model, drafting)
    common.note_idle_noise(noise_aware, sampling)
    common.check_compare(compare, drafting["method"])
    ids = pair.prompt_ids(text, **form)

    from dominotree.methods import Drafting
    from dominotree.serve.trace_file import trace_file

    output, rounds = _decode(pair, ids, sampling, pair.drafting(**drafting), show=True)
    for line in common.statistics(output, pair, sampled=sampling.temperature > 0):
        screen.note(line)
    found = {
        "prompt": text,
        "about": _about(pair, output, sampling),
        "method": output.method,
        "text": output.text,
        "rounds": rounds,
    }
    if compare:
        plain, found["plain"] = _decode(pair, ids, replace(sampling, seed=output.seed), Drafting("ar"))
        same = output.token_ids == plain.token_ids
        screen.note(f"plain decoding gives {'the same tokens' if same else 'other tokens'}")
    write_whole(out, trace_file(found))
    screen.note(f"Wrote {out}")


def _decode(
    pair: Pair, ids: list[int], sampling: SamplingParams, drafting: Any, *, show: bool = False
) -> tuple[Output, list[Json]]:
    """The answer and its rounds; `show` puts the text on standard output as it comes."""
    from dominotree.generation import Request
    from dominotree.pair import Output
    from dominotree.token_names import TokenNames
    from dominotree.trace import Trace

    assert pair.codec is not None, "read with the target"
    trace = Trace(pair.codec, TokenNames(pair.codec))
    request = Request(ids, sampling, drafting, recorder=trace.record)
    decoder = pair.decoder([request])
    short = replace(sampling, max_new_tokens=min(common.WARM_UP_TOKENS, sampling.max_new_tokens))
    decoder.run([Request(ids, short, drafting)])
    rounds: list[Json] = []
    for generation in decoder.stream(request):
        rounds += trace.take(generation)
        if show:
            screen.write(generation.take_text())
    if show:
        screen.end_line()
    return Output.of(generation), rounds


def _about(pair: Pair, output: Output, sampling: SamplingParams) -> str:
    """A line on how the answer came about."""
    from dominotree.methods import METHODS

    parts = [PurePath(pair.name).name, output.method]
    if METHODS[output.method].shape == "tree":
        parts.append(f"budget {output.budget}")
    parts.append(f"temperature {sampling.temperature:g}")
    if sampling.temperature > 0:
        parts.append(f"seed {output.seed}")
    parts.append(f"{pair.target.precision} on {pair.target.device}")
    return ", ".join(parts)


def _check_place(out: Path) -> None:
    if out.exists() and not out.is_file():
        raise InvalidRequest(f"--out {out} is a folder or a device; the name of a file is expected")
    if out.is_file():
        with out.open("rb") as file:
            held = file.read(_HEAD)
        if held and _TITLE not in held:
            raise InvalidRequest(f"--out {out} holds something else than a trace; remove it or name another file")
    if not out.parent.is_dir():
        raise InvalidRequest(f"there is no folder {out.parent} for --out; make it first")
    if not os.access(out.parent, os.W_OK):
        raise InvalidRequest(f"the folder of --out, {out.parent}, cannot be written to; name another")
