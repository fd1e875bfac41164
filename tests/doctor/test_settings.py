"""A drafter whose config is wrong in one field, or in two, is found out by its own foresight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from doctor.healthy import LAYERS, MASK, broken
from dominotree.doctor import Finding, Report, examine
from dominotree.doctor import foresight as foresight_module
from dominotree.doctor.foresight import Foresight, foresee, listen
from dominotree.doctor.settings import Alternative, examine_settings, mask_tokens
from dominotree.drafters.checkpoint import read_checkpoint
from dominotree.drafters.dflash import Drafter
from dominotree.pair import load

SETTINGS = ("shift-label", "target-layer-ids", "mask-token-id", "rope-theta", "pure-draft-prefix-len")


def wrong_settings(report: Report) -> dict[str, Finding]:
    return {finding.name: finding for finding in report.findings if finding.name in SETTINGS}


@pytest.mark.parametrize("kind", ["domino", "dflash"])
def test_a_healthy_pair_has_no_fault(request: pytest.FixtureRequest, target: Path, kind: str) -> None:
    report = examine(str(target), str(request.getfixturevalue(kind)), dtype="float32")
    machine = {"busy-machine", "threads", "no-kernels", "slower-than-plain"}
    assert {finding.name for finding in report.findings} <= machine, report.findings
    assert report.count("error") == 0
    assert report.measured["tau"] == report.measured["best_tau"] > 2.5
    assert {one["field"] for one in report.measured["tried"]} >= {"shift_label", "target_layer_ids", "mask_token_id"}


@pytest.mark.parametrize(
    ("field", "wrong", "right"),
    [
        ("shift_label", None, True),
        ("target_layer_ids", [LAYERS[0] - 1, LAYERS[1] - 1], LAYERS),
        ("target_layer_ids", [LAYERS[0] + 1, LAYERS[1] + 1], LAYERS),
        ("mask_token_id", 1, MASK),
        ("mask_token_id", 260, MASK),
        ("rope_theta", 1e6, 1e4),
        ("pure_draft_prefix_len", 0, 1),
    ],
)
def test_a_wrong_setting_is_named_with_the_right_value(
    tmp_path: Path, target: Path, domino: Path, field: str, wrong: Any, right: Any
) -> None:
    folder = broken(tmp_path, domino, **{field: wrong})
    report = examine(str(target), str(folder), dtype="float32")
    (finding,) = wrong_settings(report).values()
    assert finding.name == field.replace("_", "-")
    assert finding.figures["value"] == right
    assert finding.figures["standard_errors"] > 3.5
    assert finding.figures["tau"] > finding.figures["tau_configured"]
    assert finding.severity == "error", finding
    assert f"tau {finding.figures['tau_configured']:.2f} and {finding.figures['tau']:.2f}" in finding.known
    assert str(folder / "config.json") in finding.remedy
    assert report.measured["best_tau"] == finding.figures["tau"]


def test_a_plain_dflash_drafter_is_examined_in_the_same_way(tmp_path: Path, target: Path, dflash: Path) -> None:
    report = examine(str(target), str(broken(tmp_path, dflash, shift_label=True)), dtype="float32")
    assert wrong_settings(report)["shift-label"].figures["value"] is False
    assert all(one["field"] != "pure_draft_prefix_len" for one in report.measured["tried"])


def test_two_wrong_settings_are_both_found(tmp_path: Path, target: Path, domino: Path) -> None:
    folder = broken(tmp_path, domino, shift_label=False, mask_token_id=0)
    found = wrong_settings(examine(str(target), str(folder), dtype="float32"))
    assert {name: finding.figures["value"] for name, finding in found.items()} == {
        "shift-label": True,
        "mask-token-id": MASK,
    }


@pytest.mark.parametrize("kind", ["domino", "dflash"])
def test_foresight_is_acceptance_when_decoding(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, target: Path, kind: str
) -> None:
    """Along a greedy answer the chain that is decoded accepts at each root what was foreseen there."""
    monkeypatch.setattr(foresight_module, "STRIDE", 1)
    pair = load(target=str(target), drafter=str(request.getfixturevalue(kind)), dtype="float32")
    assert pair.drafter is not None
    prompt = pair.prompt_ids("What can you see from the tower?")
    method = "domino" if kind == "domino" else "dflash"
    output = pair.generate(prompt, method=method, max_new_tokens=60)
    known = listen(pair.target, prompt, output.token_ids, pair.drafter.feature_layers)
    foreseen = foresee(pair.drafter, [known]).accepted.tolist()
    depths = pair.drafter.config.block_size - 1  # of the drafter's own, as many are looked at whatever shift_label says
    place, compared = 0, 0
    for accepted in output.stats.accepted[:-1]:  # the last round is cut off by the length
        if place < len(foreseen):
            assert foreseen[place] == min(accepted - 1, depths)
            compared += 1
        place += accepted
    assert compared > 5


def known_answers(target: Path, drafter: Path) -> tuple[Drafter, list[Any]]:
    pair = load(target=str(target), drafter=str(drafter), dtype="float32")
    assert pair.drafter is not None
    prompts = [pair.prompt_ids(text) for text in ("Why?", "How do I begin?", "Name three birds.")]
    answers = [output.token_ids for output in pair.generate(prompts, method="ar", max_new_tokens=40)]
    both = zip(prompts, answers, strict=True)
    return pair.drafter, [listen(pair.target, prompt, answer, range(4)) for prompt, answer in both]


def test_several_answers_at_once_are_foreseen_as_each_alone(target: Path, domino: Path) -> None:
    drafter, known = known_answers(target, domino)
    together = foresee(drafter, known)
    alone = [foresee(drafter, [answer]) for answer in known]
    assert torch.equal(together.accepted, torch.cat([one.accepted for one in alone]))
    torch.testing.assert_close(together.log_place, torch.cat([one.log_place for one in alone]), atol=0.05, rtol=0)


def test_tokens_outside_the_draft_vocabulary_stand_behind_its_end(tmp_path: Path, target: Path, domino: Path) -> None:
    from drafters.synthetic import write_tiny_drafter

    whole, known = known_answers(target, domino)
    folder = write_tiny_drafter(tmp_path, vocab=264, draft_vocab=20, layer_ids=(1, 2), block=5)
    config, tensors = read_checkpoint(folder)
    few = foresee(Drafter(config, tensors, whole.target), known)
    assert foresee(whole, known).covered == 1
    followed = [token for answer in known for token in answer.tokens[answer.prompt_length + 1 :]]
    inside = set((tensors["d2t"] + torch.arange(20)).tolist())
    assert few.covered == pytest.approx(sum(t in inside for t in followed) / len(followed), abs=0.1)
    assert few.place > 21 * (1 - few.covered)


def seen(log_place: list[float]) -> Foresight:
    return Foresight(torch.tensor(log_place, dtype=torch.float64), torch.ones(len(log_place)), 1.0, 3)


def test_a_difference_that_is_the_same_everywhere_weighs_more_than_one_that_scatters() -> None:
    before = seen([1.0] * 8)
    steady = seen([0.9, 0.8] * 4).ahead_of(before)
    scattered = seen([0.0, 1.7] * 4).ahead_of(before)
    assert steady[0] == pytest.approx(scattered[0]) == pytest.approx(0.15)
    assert steady[1] > 5 > scattered[1] > 0


def test_what_is_in_doubt_is_tried_again_on_more_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of eight drafts agree at first; the further answers decide."""
    asked: list[int] = []

    class Told:
        config = type("Config", (), {"mask_token_id": 7})

        def __init__(self, mask: int = 7) -> None:
            self.mask = mask

        def reading(self, mask_token_id: int) -> Told:
            return Told(mask_token_id)

    def foresee_mask(drafter: Told, answers: list[float]) -> Foresight:
        asked.append(drafter.mask)
        better = 0.3 if drafter.mask == 9 else -0.3
        return seen([2.0 if drafter.mask == 7 else 2.0 - better * answer for answer in answers])

    monkeypatch.setattr("dominotree.doctor.settings.foresee", foresee_mask)
    groups = [[Alternative("mask_token_id", mask, str(mask)) for mask in (8, 9)]]
    few, more = [1.0, -0.3, 1.2, 0.1, 0.3, -0.2, 0.4, 0.1], [0.9, 1.1] * 16
    result = examine_settings(Told(), few, groups, where="config.json", more=lambda: more)  # type: ignore[arg-type]
    assert asked == [7, 8, 9, 7, 9]
    assert [finding.figures["value"] for finding in result.findings] == [9]
    assert len(result.configured.accepted) == len(few) + len(more)
    asked.clear()
    undecided = examine_settings(Told(), few, groups, where="config.json")  # type: ignore[arg-type]
    assert asked == [7, 8, 9]
    assert undecided.findings == ()


def test_what_helps_only_beside_a_worse_fault_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the wrong mask other layers look a little better; with the right one they are worse."""

    class Told:
        config = type("Config", (), {"target_layer_ids": (1,), "mask_token_id": 7})

        def __init__(self, **fields: Any) -> None:
            self.fields = {"target_layer_ids": (1,), "mask_token_id": 7, **fields}

        def reading(self, **fields: Any) -> Told:
            return Told(**(self.fields | fields))

    places = {((1,), 7): 2.0, ((2,), 7): 1.8, ((1,), 3): 0.2, ((2,), 3): 0.3}

    def foresee_both(drafter: Told, answers: list[float]) -> Foresight:
        return seen([places[tuple(drafter.fields.values())] * (1 + answer) for answer in answers])

    monkeypatch.setattr("dominotree.doctor.settings.foresee", foresee_both)
    groups = [[Alternative("target_layer_ids", (2,), "2")], [Alternative("mask_token_id", 3, "3")]]
    scatter = [0.01, 0.0] * 4

    def found() -> dict[str, Any]:
        result = examine_settings(Told(), scatter, groups, where="config.json")  # type: ignore[arg-type]
        assert result.best.log_place.mean() == pytest.approx(min(places.values()), rel=0.01)
        return {finding.name: finding.figures["value"] for finding in result.findings}

    assert found() == {"mask-token-id": 3}
    places[(2,), 3] = 0.1
    assert found() == {"target-layer-ids": (2,), "mask-token-id": 3}


def test_mask_tokens_begin_with_the_one_named_so_and_stay_inside_the_vocabulary(target: Path) -> None:
    pair = load(target=str(target), drafter="none", dtype="float32")
    assert mask_tokens(pair.codec, 264) == [3, 260, 263, 0, 1, 2]
    assert mask_tokens(pair.codec, 260) == [3, 259, 0, 1, 2]
    assert mask_tokens(None, 264) == []
