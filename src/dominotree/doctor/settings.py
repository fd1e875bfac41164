"""Settings of a drafter's config that raise nothing when they are wrong: each is tried the other ways."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dominotree.doctor.findings import Finding
from dominotree.doctor.foresight import Foresight, KnownAnswer, foresee
from dominotree.drafters.config import DrafterConfig, evenly_spaced_layers
from dominotree.drafters.dflash import Drafter
from dominotree.text import TextCodec

CLEARLY_BETTER = 3.5
"""Standard errors by which the mean logarithm of the place must fall; some twenty settings are tried."""
PROMISING = 1.5
"""Standard errors from which more answers are looked at."""
LEAST_GAIN = 0.02
"""By how much it must fall, or the setting does not matter."""
COSTLY = 1.05
"""A setting is an error where the right one makes tau larger by this factor, and a warning below."""

MOST_MASK_TOKENS = 12
ROPE_BASES = (1e4, 5e5, 1e6)


@dataclass(frozen=True)
class Alternative:
    """Another value of one field of the config, and how to say it."""

    field: str
    value: Any
    said: str


@dataclass(frozen=True)
class Tried:
    """An alternative, and what the drafter foresees without it and with it."""

    alternative: Alternative
    before: Foresight
    after: Foresight

    @cached_property
    def ahead(self) -> tuple[float, float]:
        """By how much the mean logarithm of the place falls, and in how many standard errors."""
        return self.after.ahead_of(self.before)

    @property
    def promising(self) -> bool:
        """Whether more answers might show it to be better."""
        gain, standard_errors = self.ahead
        return gain >= LEAST_GAIN and standard_errors >= PROMISING and COSTLY * self.after.tau >= self.before.tau

    @property
    def clearly_better(self) -> bool:
        """Whether more than chance speaks for it."""
        return self.promising and self.ahead[1] >= CLEARLY_BETTER

    def to_json(self) -> dict[str, Any]:
        """The figures."""
        return {
            "field": self.alternative.field,
            "value": self.alternative.value,
            "tau": self.after.tau,
            "place": self.after.place,
            "gain": self.ahead[0],
            "standard_errors": self.ahead[1],
        }

    def __str__(self) -> str:
        return (
            f"over {len(self.after.accepted)} drafts along the target's own answers the tokens that followed stood in "
            f"place {self.before.place:.2f} of the drafter's list as it is and in place {self.after.place:.2f} with "
            f"{self.alternative.said} (geometric means, {abs(self.ahead[1]):.1f} standard errors apart); tau "
            f"{self.before.tau:.2f} and {self.after.tau:.2f}"
        )


@dataclass(frozen=True)
class SettingsResult:
    """What the drafter foresees as configured and at its best, and everything that was tried."""

    configured: Foresight
    best: Foresight
    tried: tuple[Tried, ...]
    findings: tuple[Finding, ...]


def alternatives(
    config: DrafterConfig, num_layers: int, vocab_size: int, codec: TextCodec | None, target_rope: float | None
) -> list[list[Alternative]]:
    """What to try in place of a config, field by field, the likeliest values first; the fields that do most damage come
    first.
    """
    flipped = not config.shift_label
    flips = [Alternative("shift_label", flipped, f"shift_label {str(flipped).lower()}")]
    if config.block_size == 1 or config.pure_draft_prefix_len >= config.block_size:
        flips = []
    prefixes = [n for n in (0, 1) if config.is_domino and n != config.pure_draft_prefix_len]
    return [
        flips,
        list(_layers(config.target_layer_ids, num_layers)),
        [
            Alternative("mask_token_id", token, f"mask_token_id {token}")
            for token in mask_tokens(codec, vocab_size)
            if token != config.mask_token_id
        ],
        [
            Alternative("rope_theta", theta, f"rope_theta {theta:g}")
            for theta in sorted({*ROPE_BASES, target_rope or 1e4} - {config.rope_theta})
        ],
        [Alternative("pure_draft_prefix_len", n, f"pure_draft_prefix_len {n}") for n in prefixes],
    ]


def _layers(ids: tuple[int, ...], num_layers: int) -> Iterable[Alternative]:
    moved = {name: tuple(i + by for i in ids) for by, name in ((-1, "one lower"), (1, "one higher"))}
    if num_layers > 4:
        moved["evenly spaced"] = evenly_spaced_layers(num_layers, len(ids))
    for name, other in moved.items():
        if other != ids and min(other) >= 0 and max(other) < num_layers:
            yield Alternative("target_layer_ids", other, f"target_layer_ids {' '.join(map(str, other))} ({name})")


def mask_tokens(codec: TextCodec | None, vocab_size: int) -> list[int]:
    """Tokens that a mask is likely to be: first those named so, then the first that no text holds, then other special
    ones.
    """
    if codec is None:
        return []
    added = codec.tokenizer.get_added_tokens_decoder()
    named = [i for i, token in added.items() if "mask" in token.content.lower()]
    beyond = [codec.vocab_size, vocab_size - 1]
    likely = dict.fromkeys([*named, *beyond, *sorted(added)])
    return [token for token in likely if token < vocab_size][:MOST_MASK_TOKENS]


def examine_settings(
    drafter: Drafter,
    answers: Sequence[KnownAnswer],
    groups: Sequence[Sequence[Alternative]],
    *,
    where: str,
    more: Callable[[], Sequence[KnownAnswer]] = tuple,
    tick: Callable[[str], None] = lambda _: None,
) -> SettingsResult:
    """Tries every alternative on known answers. Of those of a field that are clearly better than the configured value
    one is a finding, and the fields that follow are tried with it in place; in the end each has to show its worth
    beside the others. Where one is promising only, it is tried again on the answers that `more` gives as well. `where`
    is the config's path.
    """

    def attempt(alternative: Alternative) -> Tried:
        tick(alternative.said)
        return Tried(alternative, best, foresee(reading.reading(**{alternative.field: alternative.value}), answers))

    reading = drafter
    tick("the drafter as configured")
    configured = best = foresee(drafter, answers)
    tried: list[Tried] = []
    winners: list[Tried] = []
    for group in groups:
        found = [attempt(alternative) for alternative in group]
        doubtful = any(one.promising for one in found) and not any(one.clearly_better for one in found)
        further = more() if doubtful else ()
        if further:
            answers, more = [*answers, *further], tuple
            tick("more answers")
            best = foresee(reading, answers)
            configured = configured if winners else best
            found = [attempt(one.alternative) if one.promising else one for one in found]
        tried += found
        better = [one for one in found if one.clearly_better]
        if better:
            winner = _first_unless_beaten(better)
            winners.append(winner)
            reading = reading.reading(**{winner.alternative.field: winner.alternative.value})
            best = winner.after
    if len(winners) > 1:
        winners, best = _worth_it_together(reading, best, winners, drafter.config, answers)
    findings = tuple(_wrong_setting(winner, drafter.config, where) for winner in winners)
    return SettingsResult(configured, best, tuple(tried), findings)


def _worth_it_together(
    reading: Drafter, best: Foresight, winners: Sequence[Tried], config: DrafterConfig, answers: Sequence[KnownAnswer]
) -> tuple[list[Tried], Foresight]:
    """The winners that gain something beside all others, and what is foreseen with them alone: a layer or a mask may
    have seemed better only because something worse was still wrong.
    """
    kept = []
    for winner in winners:
        field = winner.alternative.field
        without = reading.reading(**{field: getattr(config, field)})
        again = Tried(winner.alternative, foresee(without, answers), best)
        if not again.clearly_better:
            others = [other for other in winners if other is not winner]
            return _worth_it_together(without, again.before, others, config, answers)
        kept.append(again)
    return kept, best


def _first_unless_beaten(better: Sequence[Tried]) -> Tried:
    """The first, the likeliest beforehand; a later one only where it is clearly better than that."""
    winner = better[0]
    for one in better[1:]:
        if Tried(one.alternative, winner.after, one.after).clearly_better:
            winner = one
    return winner


def _wrong_setting(winner: Tried, config: DrafterConfig, where: str) -> Finding:
    field, value = winner.alternative.field, winner.alternative.value
    held = getattr(config, field)
    return Finding(
        field.replace("_", "-"),
        "error" if winner.after.tau >= COSTLY * winner.before.tau else "warning",
        f"{field} is {_spelled(held)} in the drafter's config; {winner.alternative.said} fits its weights better",
        str(winner),
        f"set {field} to {_spelled(value)} in {where}",
        {"configured": held, "tau_configured": winner.before.tau, **winner.to_json()},
    )


def rope_finding(result: SettingsResult, config: DrafterConfig, target_rope: float | None) -> Finding | None:
    """A rotary base that is not the target's, where neither is clearly the better one."""
    if target_rope is None or target_rope == config.rope_theta:
        return None
    ours = next(
        one for one in result.tried if (one.alternative.field, one.alternative.value) == ("rope_theta", target_rope)
    )
    if abs(ours.ahead[1]) >= CLEARLY_BETTER:  # found already, or the drafter was made that way
        return None
    return Finding(
        "rope-theta",
        "note",
        f"rope_theta is {config.rope_theta:g} in the drafter's config and {target_rope:g} in the target's; released "
        "drafters have the target's",
        str(ours),
        "check which of the two the drafter was trained with; on short prompts it may not matter",
        {"drafter": config.rope_theta, "target": target_rope, **ours.to_json()},
    )


def _spelled(value: Any) -> str:
    """A value as config.json spells it."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else f"{value:g}" if isinstance(value, float) else str(value)
