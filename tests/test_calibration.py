"""What is learned about the drafter's probabilities while decoding."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dominotree.calibration import Calibration
from dominotree.errors import InvalidRequest


def test_it_learns_an_overconfident_drafter_depth_by_depth() -> None:
    rng = np.random.default_rng(0)
    calibration = Calibration.fresh(2)
    truth = {0: (1.0, 0.0), 1: (0.6, -1.2)}
    for _ in range(4000):
        for depth, (slope, offset) in truth.items():
            p = rng.dirichlet([0.5] * 4)
            q = 1 / (1 + np.exp(-(slope * np.log(p / (1 - p) + 1e-9) + offset)))
            draw = rng.random()
            hits = np.flatnonzero(np.cumsum(q / max(1.0, q.sum())) > draw)
            calibration.observe(depth, p.tolist(), int(hits[0]) if len(hits) else None)
    kept, lowered = (np.array([calibration.acceptance(depth, p) for p in (0.1, 0.5, 0.9)]) for depth in (0, 1))
    assert np.all(np.diff(kept) > 0)
    assert np.all(np.diff(lowered) > 0)
    assert np.all(lowered < kept)
    assert kept[1] == pytest.approx(0.5, abs=0.12)
    assert lowered[1] == pytest.approx(1 / (1 + np.exp(1.2)), abs=0.1)


def test_it_follows_the_text_and_stays_sane_under_extreme_input() -> None:
    calibration = Calibration.fresh(1)
    for chosen in [None] * 3000:
        calibration.observe(0, [0.9, 0.05], chosen)
    low = calibration.acceptance(0, 0.9)
    for chosen in [0] * 3000:
        calibration.observe(0, [0.9, 0.05], chosen)
    high = calibration.acceptance(0, 0.9)
    assert low < 0.1 < 0.9 < high
    for p in (0.0, 1.0, 1e-300):
        for _ in range(200):
            calibration.observe(0, [p], 0)
    calibration.observe(0, [], None)
    assert np.isfinite(calibration.mean).all()
    assert 0 < calibration.acceptance(0, 1.0) < 1


def test_it_is_kept_and_read_again(tmp_path: Path) -> None:
    calibration = Calibration.fresh(3)
    calibration.observe(1, [0.5, 0.2], 0)
    calibration.save(tmp_path / "a" / "c.json")
    again = Calibration.load(tmp_path / "a" / "c.json", 3)
    assert again == calibration
    with pytest.raises(InvalidRequest, match="delete it"):
        Calibration.load(tmp_path / "a" / "c.json", 2)
    for text in (
        "",
        "{}",
        json.dumps({"mean": [[1]], "precision": []}),
        json.dumps({"mean": [[1, 0]], "precision": []}),
        json.dumps({"mean": [[1, 0]], "precision": [[[1, 0], [0, float("inf")]]]}),
        json.dumps({"mean": [[None, 1]], "precision": [[[1, 0], [0, 1]]]}),
    ):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(InvalidRequest, match="delete it"):
            Calibration.load(tmp_path / "bad.json", 1)


def test_a_likelier_node_never_counts_for_less() -> None:
    calibration = Calibration.fresh(1)
    for _ in range(500):
        calibration.observe(0, [0.7, 0.2, 0.05], 2)
    assert calibration.acceptance(0, 0.9) > calibration.acceptance(0, 0.1)
