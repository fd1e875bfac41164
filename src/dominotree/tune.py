"""Which method, budget, candidate width and thread count are fastest here, found by measuring."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dominotree.errors import InvalidRequest
from dominotree.machine import set_threads, usable_cpus
from dominotree.methods import Drafting
from dominotree.pair import Pair

BUDGETS = (4, 8, 15, 31)
"""With the root a row each: numbers of rows up to which passes cost little more, by the processor."""
WIDTHS = (16, 64, 256)


@dataclass(frozen=True)
class Setup:
    """A way to decode."""

    drafting: Drafting
    threads: int

    def __str__(self) -> str:
        d = self.drafting
        parts = [d.method, f"{self.threads} threads"]
        if d.kind.shape == "tree":
            parts[1:1] = [f"budget {d.budget}", f"candidates {d.candidates}"]
        return ", ".join(parts)


@dataclass(frozen=True)
class Measured:
    """A setup's tokens/s on each prompt, and its mean tokens per round."""

    setup: Setup
    speeds: tuple[float, ...]
    tau: float

    @property
    def speed(self) -> float:
        """Mean tokens/s."""
        return statistics.mean(self.speeds)


@dataclass(frozen=True)
class Advice:
    """The fastest setup, plain decoding beside it, and everything that was measured, fastest first."""

    best: Measured
    plain: Measured
    measured: tuple[Measured, ...]

    @property
    def speedup(self) -> float:
        """The best setup's speed over plain decoding's."""
        return self.best.speed / self.plain.speed

    def flags(self) -> str:
        """The best setup as options of the commands."""
        d = self.best.setup.drafting
        options = {"budget": d.budget, "candidates": d.candidates}
        named = [f"--{name} {value}" for name, value in options.items() if name not in d.kind.idle]
        return " ".join([f"--method {d.method}", f"--threads {self.best.setup.threads}", *named])


def tune(
    pair: Pair, prompts: Sequence[str], *, max_new_tokens: int = 64, tick: Callable[[str], None] = lambda _: None
) -> Advice:
    """Measures in three steps, each from the best of the step before: threads, then method and budget, then width.

    Within a step setups take turns prompt by prompt in random order, so that drift is common to all. `tick` is told
    what is measured next. Leaves the process with the best thread count.
    """
    cpus = usable_cpus()
    threads = sorted({1, (cpus + 1) // 2, cpus})
    drafts = pair.drafter is not None or pair.dflash_drafter is not None
    domino = pair.drafter is not None and pair.drafter.head is not None
    trees = ["lookuptree", "dominotree"] if domino else ["ddtree"] if drafts else ["lookup"]
    first = Drafting(trees[0])
    rng = random.Random(0)

    def run(setups: Sequence[Setup]) -> list[Measured]:
        speeds: dict[Setup, list[float]] = {setup: [] for setup in setups}
        taus: dict[Setup, list[float]] = {setup: [] for setup in setups}
        for i, prompt in enumerate([prompts[0], *prompts]):
            for setup in rng.sample(list(setups), len(setups)):
                tick(str(setup))
                set_threads(setup.threads)
                d = setup.drafting
                stats = pair.generate(
                    prompt, method=d.method, budget=d.budget, candidates=d.candidates, max_new_tokens=max_new_tokens
                ).stats
                if i and stats.rounds:  # the first warms up
                    speeds[setup].append(stats.tokens_per_s)
                    taus[setup].append(stats.mean_accepted)
        return sorted(
            (Measured(s, tuple(speeds[s]), statistics.mean(taus[s])) for s in setups if speeds[s]),
            key=lambda one: -one.speed,
        )

    by_threads = run([Setup(d, n) for n in threads for d in (Drafting("ar"), first)])
    if not by_threads:
        raise InvalidRequest("every answer ended with its first token, so nothing could be timed; give other prompts")
    best = by_threads[0].setup.threads
    set_threads(best)  # a profile is of a number of threads
    plans = [Drafting(tree, budget) for tree in trees for budget in BUDGETS] + [Drafting("ar")]
    if drafts:
        plans.append(Drafting("domino" if domino else "dflash"))
    if domino and pair.profiled:
        plans.append(Drafting("adaptive"))
    everything = run([Setup(plan, best) for plan in plans])
    top = everything[0].setup.drafting
    if "candidates" not in top.kind.idle:
        widths = [replace(top, candidates=width) for width in WIDTHS]
        others = [one for one in everything if one.setup.drafting != top]
        everything = sorted([*others, *run([Setup(plan, best) for plan in widths])], key=lambda one: -one.speed)
    set_threads(everything[0].setup.threads)
    plain = [one for one in (*everything, *by_threads) if one.setup.drafting.method == "ar"]
    return Advice(everything[0], max(plain, key=lambda one: one.speed), tuple(everything))
