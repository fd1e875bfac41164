"""Rounds without a draft where drafting does not pay."""

from __future__ import annotations

from dominotree.adaptive import Pace


def follow(pace: Pace, gains: list[float]) -> list[bool]:
    """Which of the next rounds draft, when each that does is worth the gain of its place."""
    drafted = []
    for gain in gains:
        drafted.append(pace.drafts())
        if drafted[-1]:
            pace.drafted(gain, 1.0, 1.0, 4)
    return drafted


def test_drafting_that_pays_goes_on() -> None:
    assert all(follow(Pace(), [1.1] * 50))


def test_drafting_that_does_not_pay_becomes_rare_and_is_tried_again() -> None:
    drafted = follow(Pace(), [0.7] * 200)
    assert drafted[0]
    assert sum(drafted[20:]) <= 180 / 10
    assert any(drafted[100:])


def test_drafting_comes_back_with_the_text_that_it_pays_for() -> None:
    pace = Pace()
    follow(pace, [0.7] * 100)
    drafted = follow(pace, [2.0] * 40)
    assert all(drafted[-20:])


def test_trees_are_built_a_little_larger_than_they_are_used() -> None:
    pace = Pace()
    for nodes in (16, 32, 64):
        pace.drafted(1.5, 1.0, 1.0, nodes)
        assert pace.room == 2 * nodes
    pace.drafted(1.5, 1.0, 1.0, 0)
    assert pace.room > 0


def test_the_rate_is_that_of_the_latest_rounds() -> None:
    pace = Pace()
    assert pace.rate == 0.0
    for tokens, ms in ((2.0, 10.0), (4.0, 10.0)):
        for _ in range(200):
            pace.drafted(tokens, ms, 8.0, 4)
        assert abs(pace.rate - tokens / ms) < 1e-4
