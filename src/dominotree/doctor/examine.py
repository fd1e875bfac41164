"""The examination: load what was named, let the target answer, try the drafter's settings, time both ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dominotree import hub
from dominotree.bench.datasets import BUILTIN, load_sets
from dominotree.doctor.acceptance import acceptance_finding, misfit_finding, weights_finding
from dominotree.doctor.findings import Finding, Report
from dominotree.doctor.foresight import KnownAnswer, depths_to_judge, listen, starts
from dominotree.doctor.machine import examine_machine
from dominotree.doctor.prompting import (
    draft_vocabulary_finding,
    drafter_tokenizer_finding,
    template_finding,
    thinking_finding,
    tokenizer_finding,
)
from dominotree.doctor.settings import alternatives, examine_settings, rope_finding
from dominotree.doctor.speed import measure_speed, speed_finding
from dominotree.drafters.dflash import Drafter
from dominotree.errors import DominoTreeError, InvalidRequest
from dominotree.machine import cpu_name
from dominotree.methods import Drafting
from dominotree.pair import Pair, load, load_drafter
from dominotree.targets.base import Target
from dominotree.targets.decoder import DecoderTarget

PROMPTS = 8
MORE_PROMPTS = 16
"""Answered only where the first leave a setting in doubt."""
NEW_TOKENS = 64
SPEED_PROMPTS = 3
LEAST_DRAFTS = 32
"""Fewer drafts than this say nothing about a setting."""

Tick = Callable[[str], None]


def examine(
    target: str | None = None,
    drafter: str | None = None,
    *,
    method: str | None = None,
    budget: int | None = None,
    prompts: Sequence[str] | None = None,
    max_new_tokens: int = NEW_TOKENS,
    dtype: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    exact: bool | None = None,
    tick: Tick = lambda _: None,
) -> Report:
    """Examines a pair on this machine; `tick` is told what is done next.

    Models are named as for `load`. Without `prompts` they are built-in ones; those behind the eighth are used where the
    first leave a setting in doubt. A drafter that cannot be used is a finding. Raises `ModelNotFound` where a name
    leads nowhere, `UnsupportedModel` for a target that is refused, `InvalidRequest` for a method that does not fit.
    """
    chosen = target or hub.DEFAULT_PAIR
    wanted = _default_drafter(chosen) if drafter is None else drafter
    tick("loading the target")
    bare = load(
        target=chosen, drafter="none", dflash_drafter="none", dtype=dtype, device=device, threads=threads, exact=exact
    )
    assert bare.codec is not None, "what is loaded by name has a tokenizer"
    report = Report(chosen, None if wanted == "none" else wanted, measured=_circumstances(bare.target))
    tick("timing passes")
    report.add(*examine_machine(bare.target))
    report.add(template_finding(bare.codec), tokenizer_finding(bare.codec, bare.target.vocab_size))
    used = _load_drafter(report.drafter, bare, report)
    if report.count("error"):  # nothing more can be measured
        return report
    pair = Pair(bare.target, bare.codec, used, name=chosen)
    drafting = _drafting(method, budget, pair)
    first, later = _prompt_ids(pair, _builtin_prompts() if prompts is None else prompts)
    room = min(max_new_tokens, pair.context - max(map(len, [*first, *later])))
    tick("the target answers")
    answers = _answers(pair, first, room)
    report.add(thinking_finding(bare.codec, answers))
    if drafting is not None:
        _examine_speed(pair, first[:SPEED_PROMPTS], drafting, room, report, tick)
        _examine_acceptance(pair, list(zip(first, answers, strict=True)), later, room, report, tick)
    return report


def _default_drafter(chosen: str) -> str | None:
    """The drafter of a named pair, Domino before DFlash; None for anything else."""
    names = (f"{chosen}-domino", f"{chosen}-dflash") if chosen in hub.PAIRS else ()
    return next((name for name in names if hub.has_drafter(name)), None)


def _drafting(method: str | None, budget: int | None, pair: Pair) -> Drafting | None:
    """What is timed against plain decoding; None without a drafter."""
    drafting = pair.drafting(method, budget)
    if method is not None and not drafting.kind.drafts:
        raise InvalidRequest(f"method {method} does not draft, so there is nothing to examine; name one that does")
    if pair.drafter is None:
        return None
    if budget is not None:
        drafting.kind.refuse_idle(["budget"])
    drafting.check(pair.drafter)
    return drafting


def _circumstances(target: Target) -> dict[str, Any]:
    on_gpu = target.device.type == "cuda"
    return {
        "dtype": target.precision,
        "device": str(target.device),
        "processor": torch.cuda.get_device_name(target.device) if on_gpu else cpu_name(),
        "threads": torch.get_num_threads(),
        "row_invariant": target.row_invariant,
    }


def _load_drafter(name: str | None, bare: Pair, report: Report) -> Drafter | None:
    """The drafter, or a finding that says why there is none; one that cannot be found at all is an error of use."""
    if name is None:
        report.add(_no_drafter())
        return None
    folder = hub.resolve_drafter(name)
    assert bare.codec is not None
    report.add(drafter_tokenizer_finding(bare.codec, folder))
    try:
        return load_drafter(name, bare.target, bare.codec)
    except DominoTreeError as error:
        report.add(misfit_finding(error))
        return None


def _no_drafter() -> Finding:
    return Finding(
        "no-drafter",
        "note",
        "only target and machine were examined",
        "no drafter was named, and the target is of no named pair",
        "name one with --drafter",
    )


def _builtin_prompts() -> list[str]:
    """First turns of the built-in sets, taken in turn."""
    sets = load_sets([BUILTIN])
    return [turns[0] for group in zip(*(one.samples for one in sets), strict=False) for turns in group]


def _prompt_ids(pair: Pair, prompts: Sequence[str]) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of prompts that leave room for an answer, those to begin with and those to go on with; raw text where
    there is no chat template.
    """
    assert pair.codec is not None
    raw = pair.codec.template is None
    encoded = [pair.prompt_ids(prompt, raw=raw) for prompt in prompts]
    fitting = [ids for ids in encoded if len(ids) + NEW_TOKENS // 2 <= pair.context]
    if not fitting:
        raise InvalidRequest(f"no prompt leaves room for an answer in a context of {pair.context}; give shorter ones")
    return fitting[:PROMPTS], fitting[PROMPTS : PROMPTS + MORE_PROMPTS]


def _answers(pair: Pair, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
    """The target's own greedy answers."""
    return [output.token_ids for output in pair.generate(list(prompts), method="ar", max_new_tokens=max_new_tokens)]


def _examine_speed(
    pair: Pair, prompts: Sequence[Sequence[int]], drafting: Drafting, room: int, report: Report, tick: Tick
) -> None:
    """Plain decoding and drafting, timed in turn."""

    def told() -> None:
        tick("decoding plainly and with the drafter")

    speed = measure_speed(pair, prompts, drafting, max_new_tokens=room, tick=told)
    if speed is not None:
        report.measured["speed"] = speed.to_json()
        report.add(speed_finding(speed))


def _examine_acceptance(
    pair: Pair,
    answered: Sequence[tuple[Sequence[int], Sequence[int]]],
    later: Sequence[Sequence[int]],
    room: int,
    report: Report,
    tick: Tick,
) -> None:
    """What the drafter foresees of the target's answers, as it is configured and otherwise."""
    drafter, target = pair.drafter, pair.target
    assert drafter is not None and report.drafter is not None
    config, rope = drafter.config, _rope_theta(target)
    report.add(weights_finding(config, hub.resolve_target(report.target)))
    groups = alternatives(config, target.num_layers, target.vocab_size, pair.codec, rope)
    layers = {*config.target_layer_ids}.union(
        *(one.value for group in groups for one in group if one.field == "target_layer_ids")
    )
    tick("listening to the target")
    known = [listen(target, prompt, answer, layers) for prompt, answer in answered]

    def more() -> list[KnownAnswer]:
        tick("the target answers more prompts")
        answers = _answers(pair, later, room) if later else []
        return [listen(target, prompt, answer, layers) for prompt, answer in zip(later, answers, strict=True)]

    drafts = sum(len(places) for places in starts(known, depths_to_judge(drafter)))
    if drafts < LEAST_DRAFTS:
        report.add(_too_little(drafts, len(known)))
        return
    seen = examine_settings(
        drafter,
        known,
        groups,
        where=str(hub.resolve_drafter(report.drafter) / "config.json"),
        more=more,
        tick=lambda setting: tick(f"trying the drafter: {setting}"),
    )
    report.measured |= {
        "drafts": len(seen.configured.accepted),
        "tau": seen.configured.tau,
        "best_tau": seen.best.tau,
        "place": seen.configured.place,
        "covered": seen.configured.covered,
        "tried": [one.to_json() for one in seen.tried],
    }
    useless = acceptance_finding(seen.configured, seen.best, len(seen.tried))
    report.add(useless, rope_finding(seen, config, rope))
    if useless is None:  # what is better at foreseeing nothing is no better
        report.add(*seen.findings)
    if config.draft_vocab_size is not None:
        report.add(draft_vocabulary_finding(seen.configured.covered, config.draft_vocab_size))


def _rope_theta(target: Target) -> float | None:
    """The target's rotary base; None where transformers runs it."""
    return float(target.config.rope["rope_theta"]) if isinstance(target, DecoderTarget) else None


def _too_little(drafts: int, answers: int) -> Finding:
    return Finding(
        "short-answers",
        "warning",
        "the answers are too short to judge the drafter by",
        f"{answers} answers have room for {drafts} drafts; {LEAST_DRAFTS} are needed",
        "give more prompts, or such as have longer answers (--data), or raise --max-new-tokens",
        {"drafts": drafts},
    )
