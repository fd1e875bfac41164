"""`dominotree generate`: one answer, streamed as it is decoded."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dominotree.cli import common
from dominotree.cli.common import ModelOptions, given, load_pair, read_prompt, sampling_params, screen

if TYPE_CHECKING:
    from dominotree.pair import Output, Pair


def generate(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT|-", help="The prompt; - reads it from standard input.")
    ] = None,
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
        bool, typer.Option("--compare", help="Decode plainly as well and show what drafting saves.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; its stage_ms are sums.")] = False,
) -> None:
    """Answer a prompt. The text goes to standard output, two lines of statistics to standard error."""
    text = read_prompt(prompt, raw=raw)
    form = common.prompt_form(raw=raw, system=system)
    common.check_compare(compare, method)
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
        seed=seed,
        max_new_tokens=max_new_tokens,
    )
    model = ModelOptions(target, drafter, dflash_drafter, dtype, device, threads, context, exact)
    drafting = given(method=method, budget=budget, candidates=candidates, node_topk=node_topk, noise_aware=noise_aware)
    pair, drafting = load_pair(model, drafting)
    common.note_idle_noise(noise_aware, sampling)
    common.check_compare(compare, drafting["method"])
    answer(pair, text, compare=compare, as_json=as_json, sampling=sampling, **drafting, **form)


def answer(pair: Pair, prompt: str, *, compare: bool = False, as_json: bool = False, **options: Any) -> None:
    """Decodes one prompt and shows the answer; with `compare` plainly too, from the same seed."""
    sampling = options["sampling"]
    plain_options = {name: options[name] for name in ("raw", "system") if name in options}
    if compare:
        short = replace(sampling, max_new_tokens=min(common.WARM_UP_TOKENS, sampling.max_new_tokens))
        pair.generate(prompt, **{**options, "sampling": short})
        pair.generate(prompt, method="ar", sampling=short, **plain_options)
    stream = pair.stream(prompt, **options)
    _show(stream, silent=as_json)
    output = stream.output
    if not as_json:
        for line in common.statistics(output, pair, sampled=sampling.temperature > 0):
            screen.note(line)
    plain = None
    if compare:
        same_seed = replace(sampling, seed=output.seed)
        plain = pair.generate(prompt, method="ar", sampling=same_seed, **plain_options)
    if as_json:
        record = as_record(output)
        if plain is not None:
            record["compare"] = comparison(output, plain)
        screen.write(json.dumps(record) + "\n")
    elif plain is not None:
        _show_comparison(pair, output, plain)


def _show(pieces: Iterable[str], *, silent: bool) -> None:
    for piece in pieces:
        if not silent:
            screen.write(piece)
    screen.end_line()


def as_record(output: Output) -> dict[str, Any]:
    """What `--json` prints. `budget` is None for a method without a tree."""
    from dominotree.methods import METHODS

    stats = output.stats
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "prompt_tokens": stats.prompt_tokens,
        "new_tokens": stats.new_tokens,
        "rounds": stats.rounds,
        "mean_accepted": stats.mean_accepted,
        "decode_s": stats.decode_s,
        "tokens_per_s": stats.tokens_per_s,
        "stage_ms": dict(stats.stage_ms),
        "method": output.method,
        "budget": output.budget if METHODS[output.method].shape == "tree" else None,
        "seed": output.seed,
    }


def comparison(output: Output, plain: Output) -> dict[str, Any]:
    """The plain decoding's own figures, the speedup over it, and whether the tokens are the same."""
    stats = plain.stats
    return {
        "method": plain.method,
        "new_tokens": stats.new_tokens,
        "rounds": stats.rounds,
        "mean_accepted": stats.mean_accepted,
        "decode_s": stats.decode_s,
        "tokens_per_s": stats.tokens_per_s,
        "speedup": output.stats.tokens_per_s / stats.tokens_per_s if stats.tokens_per_s else None,
        "identical": output.token_ids == plain.token_ids,
    }


def _show_comparison(pair: Pair, output: Output, plain: Output) -> None:
    from rich.box import SIMPLE
    from rich.table import Table

    found = comparison(output, plain)
    table = Table(box=SIMPLE)
    table.add_column("method")
    for name in ("tokens", "tokens/s", "tau", "rounds", "speedup", "identical"):
        table.add_column(name, justify="right")
    speedup = "-" if found["speedup"] is None else f"{found['speedup']:.2f}x"
    for each, over, same in ((plain, "1.00x", "-"), (output, speedup, "yes" if found["identical"] else "no")):
        stats = each.stats
        tau = f"{stats.mean_accepted:.2f}" if stats.rounds else "-"
        table.add_row(
            each.method,
            str(stats.new_tokens),
            f"{stats.tokens_per_s:.1f}",
            tau,
            str(stats.rounds),
            over,
            same,
        )
    screen.table(table, error=True)
    if not found["identical"]:
        both = zip(output.token_ids, plain.token_ids, strict=False)
        first = next((i for i, (a, b) in enumerate(both) if a != b), 0)
        why = (
            "this forward is row-invariant, so that is a fault worth reporting"
            if pair.target.row_invariant
            else "sums are rounded by the number of rows here; on a CPU --exact avoids it"
        )
        screen.note(f"Note: the answers part at token {first + 1}; {why}")
