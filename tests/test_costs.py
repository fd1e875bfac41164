"""The cost profile: fit, interpolation, storage, and the methods that stand on it."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from math import log
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dominotree.adaptive import AdaptiveBudget, Pace
from dominotree.calibration import Calibration
from dominotree.costs import (
    CostModel,
    calibration_path,
    fit_convex,
    fit_monotone,
    lower_hull,
    measure,
    profile_key,
    profile_path,
)
from dominotree.decode import Decoder
from dominotree.errors import InvalidRequest
from dominotree.generation import Request
from dominotree.methods import METHODS, Drafting
from dominotree.pair import Pair
from dominotree.sampling import SamplingParams
from dominotree.tree.join import path_of
from dominotree.tree.tree import Tree
from oracle import OracleDrafter, tiny_costs, tiny_drafter
from targets.tiny import tiny_target

ROWS = [1, 2, 4, 8, 16]


@given(st.lists(st.floats(0.1, 100), min_size=5, max_size=5))
@settings(deadline=None, max_examples=200)
def test_the_fit_is_monotone_and_convex_whatever_was_measured(ms: list[float]) -> None:
    fitted = fit_convex(ROWS, ms)
    slopes = np.diff(fitted) / np.diff(ROWS)
    assert np.all(slopes >= -1e-9)
    assert np.all(np.diff(slopes) >= -1e-7)


def test_a_curve_that_is_convex_already_is_kept() -> None:
    curve = [5.0, 5.1, 5.4, 6.4, 9.0]
    np.testing.assert_allclose(fit_convex(ROWS, curve), curve, atol=1e-9)


def test_a_step_that_no_convex_curve_has_spoils_small_passes_least() -> None:
    """Measured on a processor whose passes are dearer from 10 rows on."""
    rows = [1, 2, 3, 4, 6, 9, 12, 16, 17, 24, 33, 48, 65]
    ms = [17.9, 21.1, 21.7, 22.6, 23.9, 25.2, 41.1, 48.2, 50.8, 62.2, 80.6, 117.6, 154.7]
    off = np.array(fit_convex(rows, ms)) / ms - 1
    assert np.abs(off).max() < 0.15  # plain least squares: 0.23, at 9 rows


def test_the_stepped_curve_keeps_steps_and_nothing_falls() -> None:
    assert fit_monotone([9.0, 9.5, 9.5, 18.0, 18.0]) == pytest.approx([9.0, 9.5, 9.5, 18.0, 18.0])
    smooth = fit_monotone([10.0, 9.0, 12.0])
    assert smooth == sorted(smooth) and 9.0 < smooth[0] == smooth[1] < 10.0


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=30))
@settings(deadline=None, max_examples=200)
def test_a_hull_is_convex_and_touches_what_it_lies_under(values: list[float]) -> None:
    hull = lower_hull(values)
    assert all(below <= value + 1e-9 for below, value in zip(hull, values, strict=True))
    assert hull[0] == values[0] and hull[-1] == values[-1]
    slopes = np.diff(hull)
    assert np.all(np.diff(slopes) >= -1e-9)
    corners = [at for at in range(len(hull)) if hull[at] == values[at]]
    bridged = np.interp(range(len(hull)), corners, [values[at] for at in corners])
    np.testing.assert_allclose(hull, bridged)  # so no convex curve under the values is above it anywhere


def test_an_adaptive_tree_is_not_ended_where_a_pass_steps_up_but_more_pays_beyond() -> None:
    """Rows come in blocks of four: the fourth node costs as much as the next three together."""
    rows = list(range(1, 13))
    curves = [[10.0 + 4.0 * ((r - 1) // 4) for r in rows]]
    costs = CostModel({}, [100], rows, curves, curves, [8], [[0.0]], [0.0] * 12, 0.0, [0.0], [0.0], curves)
    adaptive = AdaptiveBudget(costs, Calibration.fresh(8))
    for chance, nodes in ((0.3, 3), (0.45, 11)):
        flat = Tree(list(range(11)), [-1] * 11, [0] * 11, [log(chance)] * 11, [chance] * 11)
        pace = Pace(tokens=40.0, ms=100.0)  # four nodes of a block are worth their 4 ms from 0.4 on
        assert len(adaptive.cut(flat, METHODS["adaptive"], 100, pace, Tree(), sized=True)) == nodes
    (hull,) = adaptive.sizing(METHODS["adaptive"], 11, [100], [Pace()]).costs
    assert hull == pytest.approx(lower_hull([10.0 + 4.0 * (n // 4) for n in range(12)]))


def test_costs_are_linear_between_and_beyond_the_samples_and_clamped_in_context() -> None:
    np.testing.assert_allclose(tiny_costs().verify(20, 100), 10 + np.arange(20))
    np.testing.assert_allclose(tiny_costs().verify(3, 150), 15 + np.arange(3))
    for context, edge in ((1, 100), (10_000, 200)):
        np.testing.assert_allclose(tiny_costs().round(5, context), tiny_costs().round(5, edge))
    np.testing.assert_allclose(tiny_costs().round(2, 100), np.array([10, 11, 12]) + 2 + 1 + 0.5)


def test_a_draft_of_fewer_depths_costs_less() -> None:
    costs = tiny_costs()
    assert [costs.draft(100, depths=depths) for depths in (1, 2, 4, 9, None)] == pytest.approx([1, 4 / 3, 2, 2, 2])
    assert costs.draft(150, sequences=3, depths=1) == pytest.approx(costs.draft(150, sequences=3) / 2)
    np.testing.assert_allclose(costs.round(2, 100) - costs.round(2, 100, depths=1), 1.0)


def test_each_further_sequence_costs_a_row_and_what_was_measured_of_it() -> None:
    one, three = tiny_costs().round(2, 150), tiny_costs().round(2, 150, sequences=3)
    np.testing.assert_allclose(three - one, 2 * (1 + 4.5 + 1.5 + 0.5))  # its row, pass, draft and commit


def test_a_profile_is_kept_and_read_again_and_nothing_else_is_taken_for_one(tmp_path: Path) -> None:
    tiny_costs().save(tmp_path / "p.json")
    assert CostModel.load(tmp_path / "p.json") == tiny_costs()
    (tmp_path / "q.json").write_text("{}")
    with pytest.raises(InvalidRequest, match="dominotree profile"):
        CostModel.load(tmp_path / "q.json")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stepped_ms", None),
        ("stepped_ms", []),
        ("rest_ms", "a"),
        ("verify_ms", [[0.0] * 5] * 2),
        ("draft_ms", [1.0]),
        ("depths", []),
    ],
)
def test_a_profile_of_other_values_is_none(tmp_path: Path, name: str, value: object) -> None:
    tiny_costs().save(tmp_path / "p.json")
    held = json.loads((tmp_path / "p.json").read_text())
    (tmp_path / "p.json").write_text(json.dumps({**held, name: value}))
    with pytest.raises(InvalidRequest, match=r"is no cost profile .* run `dominotree profile` again"):
        CostModel.load(tmp_path / "p.json")


@pytest.mark.parametrize("broken", ["profile", "calibration"])
def test_files_that_a_method_does_not_need_do_not_stop_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    monkeypatch.setenv("DOMINOTREE_CACHE", str(tmp_path))
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    key = profile_key("tiny", target, drafter)
    replace(tiny_costs(), key=key).save(profile_path(key))
    spoilt = profile_path(key) if broken == "profile" else calibration_path(key)
    spoilt.parent.mkdir(exist_ok=True)
    spoilt.write_text("{}")
    pair = Pair(target, None, drafter, None, name="tiny")
    with caplog.at_level(logging.WARNING, "dominotree"):
        assert pair.generate([5, 6, 7], max_new_tokens=5).method == "lookuptree"
    assert any(str(spoilt) in text for text in caplog.messages)
    if broken == "profile":
        with pytest.raises(InvalidRequest, match="needs a cost profile"):
            pair.generate([5, 6, 7], method="adaptive")
    else:
        assert pair.generate([5, 6, 7], method="adaptive", max_new_tokens=5).method == "adaptive"


def test_a_round_without_a_draft_leaves_the_next_tree_its_room() -> None:
    adaptive, pace = AdaptiveBudget(tiny_costs(), Calibration.fresh(4)), Pace(room=40)
    assert len(adaptive.cut_undrafted(Tree(), 100, pace)) == 0 and pace.room == 40
    sure = Tree([1, 2], [-1, 0], [0, 1], [log(0.95), log(0.9)], [0.0, 0.0])
    assert adaptive.cut_undrafted(sure, 100, pace) == sure  # a row is 1 ms, a token 10


def test_measuring_a_tiny_pair_gives_a_usable_profile() -> None:
    target = tiny_target("llama")
    ticks = []
    costs = measure(
        "tiny", target, tiny_drafter(target), contexts=[16, 64], rows=[1, 3, 9], repeats=2, tick=lambda: ticks.append(1)
    )
    assert len(ticks) == 2 * (3 + 1) * 2
    assert len(costs.verify_each_ms) == len(costs.draft_each_ms) == 2
    assert min(*costs.verify_each_ms, *costs.draft_each_ms) >= 0
    assert np.all(np.diff(costs.round(30, 40)) >= -1e-9)
    assert np.all(costs.round(30, 40) > 0)


@pytest.mark.parametrize("method", ["caddtree", "condadaptive", "adaptive"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_budgets_change_the_size_of_trees_and_never_the_answer(method: str, temperature: float) -> None:
    target = tiny_target("llama")
    prompt = [5, 9, 33, 2, 61]
    params = SamplingParams(temperature=temperature, seed=3, max_new_tokens=60, ignore_eos=True)
    plain = Decoder(target, context=128).run([Request(prompt, params, Drafting("ar"))])[0]
    sizes = []
    for slope in (0.0, 0.2, 50.0):
        oracle = OracleDrafter(target, [plain.tokens], right=0.7, sibling=0.2, wrong=0.1)
        adaptive = AdaptiveBudget(tiny_costs(slope), Calibration.fresh(oracle.draft_length))
        decoder = Decoder(target, oracle, context=128, max_nodes=64, adaptive=adaptive)
        got = decoder.run([Request(prompt, params, Drafting(method))])[0]
        assert got.tokens == plain.tokens
        sizes.append(sum(got.stats.nodes) / got.stats.rounds)
    assert sizes[0] > sizes[1] > sizes[2]
    assert sizes[2] < 1


def test_without_a_profile_the_methods_say_what_to_run() -> None:
    target = tiny_target("llama")
    with pytest.raises(InvalidRequest, match="dominotree profile"):
        Decoder(target, tiny_drafter(target), max_nodes=64).add(Request([1], drafting=Drafting("adaptive")))


def test_a_pair_keeps_what_it_learned_for_the_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOMINOTREE_CACHE", str(tmp_path))
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    tiny_costs(0.0).save(profile_path(profile_key("tiny", target, drafter)))

    def learned() -> Calibration:
        pair = Pair(target, None, drafter, name="tiny")
        pair.generate([5, 9, 33], method="adaptive", max_new_tokens=30, ignore_eos=True)
        decoder = next(iter(pair._decoders.values()))
        assert decoder.adaptive is not None
        return decoder.adaptive.calibration

    first, second = learned(), learned()
    fresh = Calibration.fresh(drafter.draft_length)
    assert first.mean != fresh.mean
    assert second.precision[0][0][0] > first.precision[0][0][0] > fresh.precision[0][0][0]


def test_a_profile_made_later_and_a_folder_that_cannot_be_written_do_not_stop_a_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DOMINOTREE_CACHE", str(tmp_path))
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    pair = Pair(target, None, drafter, name="tiny")
    ask = {"method": "adaptive", "max_new_tokens": 6, "ignore_eos": True}
    with pytest.raises(InvalidRequest, match="dominotree profile"):
        pair.generate([5, 9, 33], **ask)
    tiny_costs(0.0).save(profile_path(profile_key("tiny", target, drafter)))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Calibration, "save", full)
    for _ in range(2):
        assert len(pair.generate([5, 9, 33], **ask).token_ids) == 6
    assert caplog.text.count("could not be kept") == 1


def test_a_walk_teaches_what_became_of_the_drafters_own_nodes() -> None:
    told = []

    class Spy(Calibration):
        def observe(self, depth: int, conditional: Sequence[float], chosen: int | None) -> None:
            told.append((depth, list(conditional), chosen))

    tree = Tree([10, 11, 20, 12], [-1, 0, -1, 0], [0, 1, 0, 1], [-0.1, -0.2, -0.3, -0.4], [0.6, 0.5, 0.0, 0.4])
    adaptive = AdaptiveBudget(tiny_costs(), Spy.fresh(3))
    adaptive.observe(tree, [-1, 0, 3], [10, 12, 99])
    adaptive.observe(tree, [-1, 2], [20, 5])  # the text's own node: none of the drafter's was right
    assert told == [(0, [0.6], 0), (1, [0.5, 0.4], 1), (0, [0.6], None)]


def test_the_decoder_hands_on_the_path_it_walked() -> None:
    target, walks = tiny_target("llama"), []
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    plain = Decoder(target).run([Request([5, 9], params, Drafting("ar"))])[0]

    class Watched(AdaptiveBudget):
        def observe(self, tree: Tree, path: Sequence[int], choices: Sequence[int]) -> None:
            walks.append((tree, list(path), list(choices)))

    oracle = OracleDrafter(target, [plain.tokens])
    adaptive = Watched(tiny_costs(0.0), Calibration.fresh(oracle.draft_length))
    Decoder(target, oracle, max_nodes=64, adaptive=adaptive).run([Request([5, 9], params, Drafting("adaptive"))])
    assert max(len(path) for _, path, _ in walks) > 2
    for tree, path, choices in walks:
        assert path[0] == -1 and [tree.token[n] for n in path[1:]] == choices[: len(path) - 1]


def test_a_sizing_has_what_was_learned_and_the_price_of_the_depths_drafted() -> None:
    adaptive = AdaptiveBudget(tiny_costs(), Calibration.fresh(4))
    pace = Pace(reach=1, tokens=40.0, ms=100.0)
    sizing = adaptive.sizing(METHODS["adaptive"], 3, [100], [pace])
    assert sizing.calibration == adaptive.calibration.mean and sizing.rates == [pytest.approx(0.4)]
    fixed = adaptive.sizing(METHODS["caddtree"], 3, [100], [pace])
    assert fixed.calibration is None and fixed.rates is None
    assert fixed.costs[0][0] - sizing.costs[0][0] == pytest.approx(1.0, abs=0.2)  # of three more depths


def test_a_cut_counts_only_what_the_draft_adds_to_the_text() -> None:
    adaptive, pace = AdaptiveBudget(tiny_costs(), Calibration.fresh(4)), Pace()
    tree = Tree([1, 2, 3], [-1, 0, 1], [0, 1, 2], [log(0.9), log(0.8), log(0.7)], [0.9, 0.88, 0.0])
    kept = adaptive.cut(tree, METHODS["adaptive"], 100, pace, path_of([1], [0.8]), sized=True)
    assert len(kept) == 3 and pace.reach == 4  # the deepest node is the text's, not the draft's
    assert pace.added == pytest.approx((0.9 + 3.4 - 1.8) / (0.9 + 1 - 0.8**2))
