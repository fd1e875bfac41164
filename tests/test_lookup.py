"""What a text says about how it goes on."""

from __future__ import annotations

import random

import pytest

from dominotree.lookup import LONGEST_KEY, MOST_AGREED, TextLookup


def proposed(tokens: list[int], most: int = 4) -> list[int]:
    return TextLookup().propose(tokens, most).tokens


def test_what_followed_last_time_is_proposed() -> None:
    assert proposed([1, 2, 3, 4, 5, 6, 1, 2]) == [3, 4, 5, 6]
    assert proposed([1, 2, 3, 4, 5, 6, 1, 2], most=2) == [3, 4]
    assert proposed([1, 7, 8, 1, 9, 8, 1]) == [9, 8, 1, 9]  # the latest place, and round again
    assert proposed([5, 1, 2, 6, 1, 2, 7, 5, 1, 2], most=1) == [6]  # an earlier place that agrees further
    for nothing_like_it in ([], [1], [1, 2, 3]):
        assert proposed(nothing_like_it) == []
    assert proposed([1, 2, 1], most=0) == []


def test_a_text_that_goes_in_circles_goes_on_so() -> None:
    assert proposed([4, 1, 2, 1, 2, 1, 2], most=5) == [1, 2, 1, 2, 1]


def test_the_more_agreed_the_likelier() -> None:
    lookup = TextLookup()
    chances = [lookup.chance(agreed) for agreed in range(1, MOST_AGREED + 3)]
    assert chances[:MOST_AGREED] == sorted(set(chances))
    assert chances[MOST_AGREED - 1 :] == [chances[-1]] * 3
    assert 0 < chances[0] < 0.3 and 0.9 < chances[-1] < 1
    text = list(range(30))
    for agreed in (1, 2, LONGEST_KEY, LONGEST_KEY + 1, 9, 25):
        found = TextLookup().propose([*text, *text[20 - min(agreed, 20) : 20]], 3)
        assert found.tokens == [20, 21, 22]
        assert found.chances == [lookup.chance(agreed + ahead) for ahead in range(3)]


@pytest.mark.parametrize("comes_true", [True, False])
def test_what_came_of_proposals_is_learned(comes_true: bool) -> None:
    lookup, fresh = TextLookup(), TextLookup()
    tokens = [1, 2, 3, 4, 5] * 2 if comes_true else [1]
    for step in range(40):
        lookup.propose(tokens, 3)
        tokens.append(step % 5 + 1 if comes_true else 1 if step % 2 else 100 + step)
    for agreed in (1, 4, 12):
        assert (lookup.chance(agreed) > fresh.chance(agreed)) is comes_true
        assert 0 < lookup.chance(agreed) < 1


def test_a_text_read_bit_by_bit_is_the_same_text() -> None:
    rng = random.Random(0)
    for _ in range(30):
        tokens = [rng.randrange(4) for _ in range(rng.randint(2, 60))]
        growing, at = TextLookup(), 1
        while at < len(tokens):
            growing.propose(tokens[:at], 3)
            at += rng.randint(1, 7)
        assert growing.propose(tokens, 6).tokens == proposed(tokens, 6)
