"""Whether drafting pays: the same prompts decoded plainly and with the drafter, in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dominotree.doctor.findings import Finding
from dominotree.generation import Stats
from dominotree.methods import Drafting
from dominotree.pair import Pair

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Speed:
    """Tokens/s over all prompts, tau of the method, and what a round of either costs in milliseconds."""

    method: str
    plain_tokens_per_s: float
    tokens_per_s: float
    tau: float
    plain_round_ms: float
    round_ms: float
    stage_ms: dict[str, float]

    @property
    def speedup(self) -> float:
        """How many times faster than plain decoding."""
        return self.tokens_per_s / self.plain_tokens_per_s

    @property
    def tau_to_break_even(self) -> float:
        """The tau from which rounds at this cost beat plain decoding."""
        return self.round_ms / self.plain_round_ms

    def to_json(self) -> dict[str, Any]:
        """The figures."""
        return {**asdict(self), "speedup": self.speedup, "tau_to_break_even": self.tau_to_break_even}


def measure_speed(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    drafting: Drafting,
    *,
    max_new_tokens: int,
    tick: Callable[[], None] = lambda: None,
) -> Speed | None:
    """Decodes prompts greedily both ways, one after the other; the first is begun once before to warm up.

    None where no answer got past the token that its prompt's own pass yields.
    """
    plain, drafted = [Stats() for _ in range(2)]
    for i, prompt in enumerate([prompts[0], *prompts]):
        length = max_new_tokens if i else min(WARM_UP_TOKENS, max_new_tokens)
        for total, method in ((plain, Drafting("ar")), (drafted, drafting)):
            tick()
            options = {"method": method.method, "budget": method.budget, "max_new_tokens": length}
            stats = pair.generate(list(prompt), **options).stats
            if i:
                total.accepted += stats.accepted
                total.new_tokens += stats.new_tokens
                total.decode_s += stats.decode_s
                for stage, ms in stats.stage_ms.items():
                    total.stage_ms[stage] += ms
    if not plain.rounds or not drafted.rounds:
        return None
    return Speed(
        drafting.method,
        plain.tokens_per_s,
        drafted.tokens_per_s,
        drafted.mean_accepted,
        1000 * plain.decode_s / plain.rounds,
        1000 * drafted.decode_s / drafted.rounds,
        {stage: ms / drafted.rounds for stage, ms in drafted.stage_ms.items()},
    )


def speed_finding(speed: Speed) -> Finding | None:
    """Plain decoding that is faster than drafting."""
    if speed.speedup >= 1:
        return None
    spent = " + ".join(f"{stage} {ms:.1f}" for stage, ms in speed.stage_ms.items())
    return Finding(
        "slower-than-plain",
        "warning",
        "plain decoding is faster here than drafting",
        f"{speed.plain_tokens_per_s:.1f} tokens/s plainly and {speed.tokens_per_s:.1f} with {speed.method}: a round "
        f"takes {speed.round_ms:.1f} ms ({spent}) against {speed.plain_round_ms:.1f} ms of plain decoding and yields "
        f"{speed.tau:.2f} tokens, where {speed.tau_to_break_even:.2f} would be even",
        "see which budget pays with dominotree tune, or use --method ar; a better drafter raises the tokens a round",
        speed.to_json(),
    )
