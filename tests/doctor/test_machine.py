"""Threads, bf16, kernels, and drafting that does not pay."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dominotree import machine
from dominotree.doctor import examine
from dominotree.doctor import machine as examined
from dominotree.doctor.machine import bf16_finding, kernels_finding, load_finding, threads_finding
from dominotree.doctor.speed import Speed, speed_finding
from dominotree.drafters.dflash import Drafter
from targets.tiny import tiny_target


def names(report: Any) -> set[str]:
    return {finding.name for finding in report.findings}


def test_more_threads_than_can_run_are_found_and_left_as_they_were(
    monkeypatch: pytest.MonkeyPatch, target: Path
) -> None:
    monkeypatch.setattr(machine, "usable_cpus", lambda: 1)
    before = torch.get_num_threads()
    try:
        report = examine(str(target), dtype="float32", threads=2, max_new_tokens=8)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    (finding,) = (finding for finding in report.findings if finding.name == "threads")
    assert finding.severity == "warning"
    assert (finding.figures["threads"], finding.figures["usable"]) == (2, 1)
    assert sorted(finding.figures["ms"]) == [1, 2]
    assert "--threads 1" in finding.remedy


@pytest.mark.parametrize(
    ("threads", "usable", "ms", "advised"),
    [
        (2, 2, {1: 30.0, 2: 16.0}, None),
        (2, 2, {1: 30.0, 2: 33.0}, None),
        (2, 2, {1: 30.0, 2: 60.0}, 1),
        (8, 2, {1: 30.0, 2: 16.0, 8: 90.0}, 2),
        (8, 2, {1: 30.0, 2: 29.0, 8: 30.0}, 2),
        (1, 4, {1: 30.0}, None),
    ],
)
def test_threads_are_judged_by_number_and_by_time(
    threads: int, usable: int, ms: dict[int, float], advised: int | None
) -> None:
    finding = threads_finding(threads, usable, ms)
    assert (finding is not None) == (advised is not None)
    if finding is not None:
        assert f"--threads {advised}," in finding.remedy
        assert f"{ms[threads]:.1f} ms with {threads}" in finding.known


def test_bf16_that_is_imitated_is_found_with_both_times(monkeypatch: pytest.MonkeyPatch, target: Path) -> None:
    monkeypatch.setattr(machine, "cpu_has_bf16", lambda: False)
    report = examine(str(target), dtype="bfloat16", max_new_tokens=8)
    (finding,) = (finding for finding in report.findings if finding.name == "bf16-emulated")
    assert finding.severity == "warning"
    assert finding.figures["bfloat16_ms"] > 0 and finding.figures["float32_ms"] > 0
    assert "--dtype float32" in finding.remedy
    assert "bf16-emulated" not in names(examine(str(target), dtype="float32", max_new_tokens=8))


def test_bf16_that_the_hardware_has_is_no_finding() -> None:
    target = tiny_target(dtype=torch.bfloat16)
    assert bf16_finding(target, True) is None
    assert bf16_finding(target, False) is not None


def test_missing_kernels_are_found_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examined.native, "available", lambda: False)
    monkeypatch.setattr(examined.native, "reason", lambda: "no compiler is there")
    finding = kernels_finding(tiny_target(exact=False))
    assert finding is not None
    assert finding.known == "no compiler is there"
    assert "--exact" in finding.remedy
    monkeypatch.setattr(examined.native, "available", lambda: True)
    assert kernels_finding(tiny_target(exact=False)) is None


@pytest.mark.parametrize(("load", "found"), [(0.0, False), (2.0, False), (2.5, True)])
def test_a_machine_with_more_to_do_than_processors_is_busy(load: float, found: bool) -> None:
    assert (load_finding(load, 2) is not None) == found


def test_drafting_that_costs_more_than_it_yields_is_found(
    monkeypatch: pytest.MonkeyPatch, target: Path, domino: Path
) -> None:
    draft = Drafter.draft

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.05)
        return draft(*arguments, **options)

    monkeypatch.setattr(Drafter, "draft", slow)
    report = examine(str(target), str(domino), dtype="float32", max_new_tokens=16, prompts=["Why?", "How?"] * 4)
    (finding,) = (finding for finding in report.findings if finding.name == "slower-than-plain")
    assert finding.severity == "warning"
    assert finding.figures["speedup"] < 1
    assert finding.figures["tau"] < finding.figures["tau_to_break_even"]
    assert f"draft {finding.figures['stage_ms']['draft']:.1f}" in finding.known


def test_the_method_and_budget_that_are_named_are_timed(target: Path, domino: Path) -> None:
    report = examine(str(target), str(domino), method="domino", dtype="float32", max_new_tokens=8)
    assert report.measured["speed"]["method"] == "domino"


@pytest.mark.parametrize(("plain", "drafted", "found"), [(10.0, 9.0, True), (10.0, 10.0, False), (10.0, 30.0, False)])
def test_speed_is_judged_against_plain_decoding(plain: float, drafted: float, found: bool) -> None:
    speed = Speed("dominotree", plain, drafted, 2.0, 100.0, 220.0, {"draft": 20.0, "verify": 200.0})
    assert (speed_finding(speed) is not None) == found
    assert speed.tau_to_break_even == pytest.approx(2.2)
