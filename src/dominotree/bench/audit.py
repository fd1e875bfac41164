"""Proof or refutation that a method is lossless: prompts decoded plainly and with it, every token compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dominotree.bench.lossless import Difference, first_difference
from dominotree.bench.runner import generate
from dominotree.methods import Drafting
from dominotree.pair import Pair
from dominotree.sampling import SamplingParams


@dataclass(frozen=True)
class Parting:
    """An answer that is not plain decoding's: which prompt's, counted from 0, and where the two part."""

    prompt: int
    difference: Difference

    def to_json(self) -> dict[str, Any]:
        """The difference's fields beside the prompt's number."""
        return {"prompt": self.prompt, **self.difference.to_json()}


@dataclass
class Comparison:
    """A method against plain decoding in one dtype at one temperature, over `prompts` prompts.

    `tokens` are those of plain decoding's answers, `compared` those up to where the answers part.
    """

    dtype: str
    row_invariant: bool
    temperature: float
    prompts: int = 0
    tokens: int = 0
    compared: int = 0
    partings: list[Parting] = field(default_factory=list)

    @property
    def bugs(self) -> list[Parting]:
        """Differences that rounding does not explain."""
        return [parting for parting in self.partings if parting.difference.kind == "BUG"]

    @property
    def ties(self) -> list[Parting]:
        """Differences that rounding explains."""
        return [parting for parting in self.partings if parting.difference.kind == "tie"]

    @property
    def identical(self) -> int:
        """Answers without a difference."""
        return self.prompts - len(self.partings)

    def to_json(self) -> dict[str, Any]:
        """The counts and every difference."""
        return {
            "dtype": self.dtype,
            "row_invariant": self.row_invariant,
            "temperature": self.temperature,
            "prompts": self.prompts,
            "tokens": self.tokens,
            "compared": self.compared,
            "identical": self.identical,
            "ties": len(self.ties),
            "bugs": len(self.bugs),
            "differences": [parting.to_json() for parting in self.partings],
        }


def audit(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    drafting: Drafting,
    temperatures: Sequence[float],
    *,
    seed: int = 0,
    max_new_tokens: int = 64,
    tick: Callable[[str], None] = lambda _: None,
) -> list[Comparison]:
    """Decodes every prompt (token ids) plainly and with `drafting` at every temperature, from the same seed.

    Where two answers part, both forwards are made again at that place to tell a tie from a bug, see
    `first_difference`. `tick` is told what comes next.
    """
    dtype = pair.target.precision
    comparisons = []
    for temperature in temperatures:
        sampling = SamplingParams(temperature=temperature, seed=seed, max_new_tokens=max_new_tokens)
        found = Comparison(dtype, pair.target.row_invariant, temperature)
        for number, prompt in enumerate(prompts):
            tick(f"{dtype} at temperature {temperature:g}: prompt {number + 1} of {len(prompts)}")
            plain = generate(pair, prompt, sampling, Drafting("ar"))
            other = generate(pair, prompt, sampling, drafting)
            difference = first_difference(pair, prompt, plain, other, sampling, drafting=drafting)
            found.prompts += 1
            found.tokens += len(plain.token_ids)
            found.compared += len(plain.token_ids) if difference is None else difference.position
            if difference is not None:
                found.partings.append(Parting(number, difference))
        comparisons.append(found)
    return comparisons
