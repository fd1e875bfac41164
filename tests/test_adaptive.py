"""Rounds without a draft where drafting does not pay."""

from __future__ import annotations

import pytest

from dominotree.adaptive import Pace, Worth

PLAIN = Worth(0, 1.0, 1.0)


def drafted(pace: Pace, gain: float, nodes: int = 4, said: float = 0.0) -> None:
    """A round with a draft took twice as long as one without, and yields `gain` times as much in that time."""
    pace.drafted(Worth(nodes, 2 * gain, 2.0), PLAIN, said)


def follow(pace: Pace, gains: list[float]) -> list[bool]:
    """Which of the next rounds draft, when each that does is worth the gain of its place."""
    drafts = []
    for gain in gains:
        drafts.append(pace.drafts())
        if drafts[-1]:
            drafted(pace, gain)
        else:
            pace.rested(PLAIN)
    return drafts


def test_drafting_that_pays_goes_on() -> None:
    assert all(follow(Pace(), [1.1] * 50))


def test_drafting_that_does_not_pay_becomes_rare_and_is_tried_again() -> None:
    drafts = follow(Pace(), [0.7] * 200)
    assert drafts[0]
    assert sum(drafts[20:]) <= 180 / 10
    assert any(drafts[100:])


def test_drafting_comes_back_with_the_text_that_it_pays_for() -> None:
    pace = Pace()
    follow(pace, [0.7] * 100)
    assert all(follow(pace, [2.0] * 40)[-20:])


def test_a_draft_is_left_out_where_the_text_itself_says_what_follows() -> None:
    pace = Pace()
    for _ in range(200):
        drafted(pace, 1.25)  # a draft adds 1.5 tokens, in a time that is worth 1.25
    assert pace.added == pytest.approx(1.5) and pace.rate == pytest.approx(1.25, rel=1e-3)
    assert pace.drafts(0.4) and not pace.drafts(0.42)  # 1 - 0.41 ** 2 is 1.25 / 1.5
    assert pace.waited == 0, "that is the text's doing: nothing was learned of the drafter"
    assert pace.drafts()


def test_a_drafter_is_not_tried_again_where_the_text_leaves_nothing_open() -> None:
    pace = Pace()
    follow(pace, [0.5] * 60)
    waited = pace.waited
    assert not any(pace.drafts(0.9) for _ in range(100))
    assert pace.waited == waited
    assert any(pace.drafts(0.1) for _ in range(20))


def test_what_a_draft_adds_is_told_by_the_rounds_in_which_the_text_says_little() -> None:
    pace = Pace()
    for _ in range(200):
        drafted(pace, 1.25)
        pace.drafted(Worth(9, 8.0, 2.0), Worth(9, 8.0, 1.0), 1.0)  # nothing to add where all is known
    assert pace.added == pytest.approx(1.5, rel=1e-3)


def test_trees_are_built_a_little_larger_than_they_are_used() -> None:
    pace = Pace()
    for nodes in (16, 32, 64):
        drafted(pace, 1.5, nodes)
        assert pace.room == 2 * nodes
    drafted(pace, 1.5, 0)
    assert pace.room > 0


def test_the_rate_is_that_of_the_latest_rounds_with_a_draft_or_without() -> None:
    pace = Pace()
    assert pace.rate == 0.0
    for gain in (1.0, 2.0):
        for _ in range(200):
            drafted(pace, gain)
        assert pace.rate == pytest.approx(gain, abs=1e-4)
    for _ in range(200):
        pace.rested(Worth(3, 3.0, 1.0))
    assert pace.rate == pytest.approx(3.0, abs=1e-4)


def test_a_draft_that_shows_the_text_to_be_wrong_takes_nothing_away() -> None:
    pace = Pace()
    drafted(pace, 1.25)
    before = pace.added
    pace.drafted(Worth(2, 2.0, 2.0), Worth(9, 6.0, 1.0), 1.0)
    assert pace.added == pytest.approx(before)
