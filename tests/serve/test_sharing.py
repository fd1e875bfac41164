"""A pass is shared out by worth; what is cut away is only speed."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dominotree.serve import sharing
from dominotree.serve.engine import Limits
from dominotree.serve.sharing import CPU_ROWS, GPU_ROWS, SLOW_CPU_ROWS, RowShare
from dominotree.tree.tree import Tree
from oracle import tiny_costs
from serve.conftest import serving, tiny_pair
from serve.test_engine import mixed_requests, solo, streamed_text


def tree(*chances: float) -> Tree:
    """A chain whose paths have these probabilities."""
    n = len(chances)
    return Tree(list(range(n)), [i - 1 for i in range(n)], list(range(n)), [math.log(c) for c in chances], [1.0] * n)


def test_the_likeliest_nodes_of_all_sequences_are_kept() -> None:
    trees = [tree(0.9, 0.8, 0.1), tree(0.5, 0.05), tree(0.3), Tree()]
    assert [len(t) for t in RowShare(8).cut(trees, 4, 100, 4)] == [2, 1, 1, 0]
    assert [len(t) for t in RowShare(6).cut(trees, 4, 100, 4)] == [2, 0, 0, 0]
    assert [len(t) for t in RowShare(3).cut(trees, 4, 100, 4)] == [0, 0, 0, 0]
    assert [len(t) for t in RowShare(100).cut(trees, 4, 100, 4)] == [3, 2, 1, 0]


def test_a_profile_sets_how_many() -> None:
    trees = [tree(0.9, 0.8, 0.1), tree(0.5, 0.05)]
    dear, cheap = RowShare(64, tiny_costs(slope=50.0)), RowShare(64, tiny_costs(slope=0.001))
    assert [len(t) for t in cheap.cut(trees, 2, 100, 2)] == [3, 2]
    assert sum(len(t) for t in dear.cut(trees, 2, 100, 2)) <= 2


@given(
    st.lists(st.lists(st.floats(0.01, 0.99), max_size=8), min_size=1, max_size=6),
    st.integers(1, 40),
    st.integers(0, 3),
)
@settings(deadline=None)
def test_no_pass_is_larger_than_allowed_and_every_part_is_a_tree(
    chances: list[list[float]], rows: int, plain: int
) -> None:
    trees = [tree(*sorted(c, reverse=True)) for c in chances]
    sequences = len(trees) + plain
    kept = RowShare(rows).cut(trees, sequences, 100, sequences)
    assert sequences + sum(map(len, kept)) <= max(rows, sequences)
    assert sum(map(len, kept)) == max(0, min(sum(map(len, trees)), rows - sequences))
    for part, whole in zip(kept, trees, strict=True):
        assert part.token == whole.token[: len(part)]


def test_a_limit_that_is_given_counts_more_than_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert RowShare.on(cpu, 5, tiny_costs()).costs is None
    assert RowShare.on(cpu, None, tiny_costs()).costs is not None
    for has_bf16, rows in ((True, CPU_ROWS), (False, SLOW_CPU_ROWS)):
        monkeypatch.setattr(sharing, "cpu_has_bf16", lambda has_bf16=has_bf16: has_bf16)
        assert (RowShare.on(cpu, None, None).max_rows, RowShare.on(gpu, None, None).max_rows) == (rows, GPU_ROWS)


def rounds_that_draft(
    share: RowShare, sequences: int, trees: list[Tree], accepted: int, rounds: int = 60
) -> list[bool]:
    drafted = []
    for _ in range(rounds):
        drafted.append(share.pays(sequences))
        if drafted[-1]:
            kept = sum(map(len, share.cut(trees, sequences, 100, sequences)))
            share.observe(min(accepted, kept))
    return drafted


def test_rounds_go_without_drafts_that_do_not_pay_and_look_again() -> None:
    likely, unlikely = [tree(0.9, 0.8), tree(0.9, 0.8)], [tree(0.01), tree(0.01)]
    share = RowShare(64, tiny_costs(slope=0.001))
    assert all(rounds_that_draft(share, 2, likely, 4))
    drafted = rounds_that_draft(share, 2, unlikely, 0)
    assert 2 < sum(drafted[-40:]) < 10
    assert share.pays(3)  # of another number of sequences nothing is known
    assert all(rounds_that_draft(share, 2, likely, 4)[-20:])
    assert all(rounds_that_draft(RowShare(64), 2, unlikely, 0))  # without a profile there is nothing to tell by


def test_what_texts_say_counts_as_nobodys_draft() -> None:
    """Rounds without a draft, in which a text is right or wrong, say nothing of the drafter."""
    said, unlikely = [tree(0.9, 0.8)], [tree(0.01), tree(0.01)]
    share = RowShare(64, tiny_costs(slope=0.3))
    rounds_that_draft(share, 2, unlikely, 0)
    drafts = []
    for _ in range(40):
        drafts.append(share.pays(2))
        if drafts[-1]:
            share.cut(unlikely, 2, 100, 2)
        else:
            assert share.cut(said, 2, 100, 0) == said  # at the price of rows alone
        share.observe(0)
    assert 1 < sum(drafts) < 6
    assert share.cut([tree(0.9, 0.8), tree(0.9, 0.8)], 2, 100, 2) != [], "nor is the drafter believed less"


def test_a_drafter_that_promises_too_much_is_believed_less() -> None:
    trees = [tree(0.9, 0.85, 0.8), tree(0.9, 0.85, 0.8)]
    honest, boasting = (RowShare(64, tiny_costs(slope=0.3)) for _ in range(2))
    assert all(rounds_that_draft(honest, 2, trees, 5))
    assert sum(rounds_that_draft(boasting, 2, trees, 0)[-40:]) < 10


@pytest.mark.parametrize("slope", [0.3, 1.0])
@pytest.mark.parametrize("wrong", [60, 1000])
def test_a_drafter_that_was_wrong_for_a_while_is_believed_again(slope: float, wrong: int) -> None:
    trees, share = [tree(0.9, 0.85, 0.8), tree(0.9, 0.85, 0.8)], RowShare(64, tiny_costs(slope=slope))
    rounds_that_draft(share, 2, trees, 0, wrong)
    assert sum(rounds_that_draft(share, 2, trees, 6, 400)[-100:]) > 90
    assert sum(len(part) for part in share.cut(trees, 2, 100, 2)) > 2


@pytest.mark.parametrize("rows", [1, 9, 30])
def test_answers_stay_the_same_however_few_rows_there_are(rows: int) -> None:
    with serving(tiny_pair(), Limits(max_batch=6, max_rows=rows, context=512)) as served:
        bodies = mixed_requests(10)
        expected = [solo(served, body) for body in bodies]
        with ThreadPoolExecutor(10) as pool:
            assert list(pool.map(lambda body: streamed_text(served, body), bodies)) == expected
