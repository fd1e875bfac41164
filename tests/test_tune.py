"""Advice on how to decode here: it can be followed as it is printed, and compares with the best of plain decoding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from cli.conftest import TEMPLATE, VOCAB, byte_tokenizer
from dominotree.drafters.dflash import Drafter
from dominotree.errors import InvalidRequest
from dominotree.pair import Pair
from dominotree.text import TextCodec
from dominotree.tune import Advice, tune
from oracle import tiny_drafter
from targets.tiny import tiny_target

PROMPTS = ["one", "another"]


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


def pair(drafter: str | None) -> Pair:
    target = tiny_target(vocab_size=VOCAB, max_position_embeddings=512)
    used: Drafter | None = None
    if drafter is not None:
        used = tiny_drafter(target, projector=None if drafter == "dflash" else drafter)
    return Pair(target, TextCodec(byte_tokenizer(), TEMPLATE), used, name="tiny")


@pytest.mark.parametrize(("drafter", "tree"), [("domino", "lookuptree"), ("dflash", "ddtree"), (None, "lookup")])
def test_advice_can_be_followed_and_is_beside_the_best_of_plain_decoding(drafter: str | None, tree: str) -> None:
    made = tune(pair(drafter), PROMPTS, max_new_tokens=6)
    assert {"ar", tree} <= {one.setup.drafting.method for one in made.measured}
    assert made.best == made.measured[0]
    for one in made.measured:
        words = Advice(one, made.plain, made.measured).flags().split()
        given = [word.removeprefix("--").replace("-", "_") for word in words if word.startswith("--")]
        assert {"method", "threads"} <= set(given)
        one.setup.drafting.kind.refuse_idle(given)
        assert ("budget" in given) == (one.setup.drafting.kind.shape == "tree")
    plain = [one for one in made.measured if one.setup.drafting.method == "ar"]
    assert made.plain.setup.drafting.method == "ar" and made.plain.speed >= max(one.speed for one in plain)


def test_a_profile_is_looked_for_at_the_threads_that_are_best(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(Pair, "profiled", property(lambda _: bool(asked.append(torch.get_num_threads()))))
    monkeypatch.setattr("dominotree.tune.usable_cpus", lambda: 3)
    made = tune(pair("domino"), PROMPTS, max_new_tokens=4)
    [best] = {one.setup.threads for one in made.measured if one.setup.drafting.method == "dominotree"}
    assert asked == [best]


def test_answers_that_end_at_once_cannot_be_timed() -> None:
    with pytest.raises(InvalidRequest, match="nothing could be timed"):
        tune(pair(None), PROMPTS, max_new_tokens=1)


def test_the_width_is_named_where_it_matters() -> None:
    made = tune(pair("domino"), PROMPTS, max_new_tokens=4)
    chosen = replace(made.best.setup.drafting, method="dominotree", candidates=16, budget=8)
    best = replace(made.best, setup=replace(made.best.setup, drafting=chosen, threads=2))
    assert replace(made, best=best).flags() == "--method dominotree --threads 2 --budget 8 --candidates 16"
