"""Prompt lookup: what followed in the text itself the last time it read as it does now.

Texts repeat: code names what it defined, answers quote their prompts, small models go round in circles. The longest
ending of the text that stood in it before is found by its last tokens, and what followed there is proposed again
(prompt lookup decoding, Saxena 2023). How often that comes true depends on how much of the text agreed, and on the
text: both are learned on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log

LONGEST_KEY = 3
"""Tokens by which earlier places are found; from there on agreement is counted token by token."""
MOST_AGREED = 20
"""Tokens of agreement beyond which more says nothing more."""
_PRECISION = 1.0
_FORGET = 0.97


@dataclass
class Continuation:
    """Tokens that may follow a text, and for each the chance that it does where those before it did."""

    tokens: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)


class TextLookup:
    """The earlier places of one text, and how far they can be believed."""

    def __init__(self) -> None:
        self._behind: dict[tuple[int, ...], int] = {}  # a run of tokens to the place behind its latest occurrence
        self._read = 0
        self._offset, self._precision = 0.0, _PRECISION
        self._proposed: tuple[int, int, list[int]] = (0, 0, [])  # where, tokens of agreement, what
        self._asked = (0, 0)
        self._said = Continuation()

    def propose(self, tokens: Sequence[int], most: int) -> Continuation:
        """At most `most` tokens that may follow `tokens`, which has to begin with what was given before."""
        if self._asked == (len(tokens), most):
            return self._said
        self._learn(tokens)
        self._index(tokens)
        place, agreed = self._earlier(tokens)
        again = tokens[place:] if agreed else []  # and round again, where that is shorter than what is asked for
        found = [again[i % len(again)] for i in range(most)] if again else []
        self._proposed, self._asked = (len(tokens), agreed, found), (len(tokens), most)
        self._said = Continuation(found, [self.chance(agreed + ahead) for ahead in range(len(found))])
        return self._said

    def chance(self, agreed: int) -> float:
        """The chance that what followed `agreed` tokens the last time follows them again."""
        prior = 1 - 0.75 * exp(-0.7 * log(min(agreed, MOST_AGREED)))
        return 1 / (1 + exp(-self._offset) * (1 - prior) / prior)

    def _learn(self, tokens: Sequence[int]) -> None:
        """Compares what was proposed with what came."""
        start, agreed, proposed = self._proposed
        for ahead, (token, came) in enumerate(zip(proposed, tokens[start:], strict=False)):
            chance = self.chance(agreed + ahead)
            self._precision = _FORGET * self._precision + (1 - _FORGET) * _PRECISION + chance * (1 - chance)
            self._offset += ((token == came) - chance) / self._precision
            if token != came:
                break

    def _index(self, tokens: Sequence[int]) -> None:
        """Takes in every run that something follows."""
        for end in range(max(self._read, 1), len(tokens)):
            for length in range(1, min(LONGEST_KEY, end) + 1):
                self._behind[tuple(tokens[end - length : end])] = end
        self._read = len(tokens)

    def _earlier(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Where the text went on before, after how many tokens like its last ones; 0 of them: nowhere."""
        end = len(tokens)
        for length in range(min(LONGEST_KEY, end), 0, -1):
            place = self._behind.get(tuple(tokens[end - length :]))
            if place is not None:
                while length < min(MOST_AGREED, place) and tokens[place - length - 1] == tokens[end - length - 1]:
                    length += 1
                return place, length
        return 0, 0
