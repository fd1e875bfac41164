import json
import os
from pathlib import Path

import numpy as np
import pytest

from dominotree.bench.records import CalibrationBin, InvalidRecord, Record, read_records
from dominotree.bench.statistics import (
    Configuration,
    ablation_pairs,
    acceptance_by_depth,
    best_budgets,
    bootstrap_intervals,
    budget_curves,
    calibration_error,
    cells,
    collect,
    compare,
    default_pairs,
    endings,
    notes,
    reliability,
    scopes,
    stage_times,
    width_curves,
)

ROOT = Path(__file__).parents[2]
PUBLISHED = Path(os.environ.get("DOMINOTREE_SHARED", ROOT / "../shared")) / "data/published-qwen3-4b"


def record(method="dominotree", budget=None, speed=10.0, dataset="gsm8k", sample=0, run="a", **more):
    temperature = more.pop("temperature", 0.0)
    tau = more.pop("tau", 2.0)
    turn = more.pop("turn", 0)
    return Record(
        run,
        "m",
        method,
        budget,
        dataset,
        temperature,
        sample,
        turn,
        100,
        100 / (speed or 1),
        speed,
        tau,
        **more,
    )


def cell(found, **where):
    chosen = [
        c
        for c in found
        if all(getattr(c, name, getattr(c.configuration, name, None)) == value for name, value in where.items())
    ]
    assert len(chosen) == 1, chosen
    return chosen[0]


@pytest.fixture(scope="module")
def published():
    if not (PUBLISHED / "records.jsonl").is_file():
        pytest.skip("the published records are not here (../shared, or the folder DOMINOTREE_SHARED names)")
    expected = json.loads((PUBLISHED / "expected.json").read_text())
    return collect(read_records([PUBLISHED / "records.jsonl"]).records), expected


def test_published_cells_are_reproduced(published):
    series, expected = published
    found = {}
    for c in cells(series):
        found.setdefault((c.temperature, c.dataset, c.configuration.method), c)
    for row in expected["cells"]:
        c = found[row["temperature"], row["dataset"], row["method"]]
        assert c.speedup == pytest.approx(row["speedup"], abs=0.01)
        assert c.tau == pytest.approx(row["tau"], abs=0.01)
    overall = found[0.0, "overall", "dominotree"]
    assert (round(overall.speedup, 2), round(overall.tau, 2)) == (4.81, 7.98)


def test_published_differences_and_intervals_are_reproduced(published):
    series, expected = published
    found = {
        (c.temperature, c.scope, c.a.method, c.b.method): c
        for c in compare(default_pairs(series))
        if c.b.method != "ar"
    }
    for row in expected["pairwise"]:
        c = found[row["temperature"], row["scope"], row["a"], row["b"]]
        assert c.n == row["n"]
        assert c.delta_pct == pytest.approx(row["delta_pct"], abs=0.02)
        assert [c.ci_low, c.ci_high] == pytest.approx(row["ci"], abs=0.8)


def test_speedup_is_the_ratio_of_mean_speeds_within_the_run_and_temperature():
    found = cells(
        collect(
            [record("ar", speed=s, sample=i) for i, s in enumerate((10.0, 30.0))]
            + [record(speed=s, sample=i, tau=t) for i, (s, t) in enumerate(((20.0, 2.0), (80.0, 5.0)))]
            + [record("ar", speed=1.0, run="b"), record("ar", speed=2.0, temperature=1.0)]
        )
    )
    c = cell(found, method="dominotree", dataset="gsm8k")
    assert (c.speedup, c.tau, c.tokens_per_s, c.n) == (2.5, 3.5, 50.0, 2)


def test_group_rows_are_plain_means_over_the_measured_sets():
    speeds = {"gsm8k": [20.0, 20.0, 20.0], "humaneval": [40.0], "mine": [90.0]}
    records = [
        record(method, speed=speed if method != "ar" else 10.0, dataset=name, sample=i)
        for method in ("ar", "dominotree")
        for name, several in speeds.items()
        for i, speed in enumerate(several)
    ]
    found = cells(collect(records))
    overall = cell(found, method="dominotree", dataset="overall")
    assert (overall.speedup, overall.tokens_per_s, overall.n) == (3.0, 30.0, 4)
    assert cell(found, method="dominotree", dataset="math").speedup == 2.0
    assert not [c for c in found if c.dataset == "chat"]
    assert list(scopes(speeds)) == ["gsm8k", "humaneval", "mine", "math", "code", "overall"]
    assert scopes(["mine", "yours"])["overall"] == ("mine", "yours")


def test_a_data_set_named_like_a_group_is_refused():
    with pytest.raises(InvalidRecord, match="rename the data set"):
        collect([record(dataset="math")])


def test_without_ar_there_is_no_speedup_and_a_note_says_so():
    series = collect([record(), record("domino", sample=0)])
    assert {c.speedup for c in cells(series)} == {None}
    assert any("has no `ar` records" in line for line in notes(series))
    assert [c.delta_pct for c in compare(default_pairs(series))] == [0.0] * 3


def test_differing_prompts_are_noted():
    series = collect([record("ar"), record(), record(sample=1)])
    assert any("not all measured on the same prompts (ar 1, dominotree 2" in line for line in notes(series))
    assert notes(collect([record("ar"), record()])) == []


def test_pairs_of_one_run_compare_tokens_per_second_on_shared_prompts():
    series = collect(
        [record(speed=s, sample=i) for i, s in enumerate((20.0, 40.0, 99.0))]
        + [record("domino", speed=s, sample=i) for i, s in enumerate((10.0, 30.0))]
    )
    (row,) = [c for c in compare(default_pairs(series)) if c.scope == "gsm8k"]
    assert (row.a.method, row.b.method, row.n) == ("dominotree", "domino", 2)
    assert row.delta_pct == pytest.approx(50.0)


def test_pairs_of_different_runs_compare_each_prompts_speedup_over_its_own_ar():
    slow = [record("ar", speed=s, sample=i, run="slow") for i, s in enumerate((1.0, 2.0, 4.0))]
    slow += [record("ddtree", 16, speed=s, sample=i, run="slow") for i, s in enumerate((2.0, 8.0, 8.0))]
    fast = [record("ar", speed=10.0, sample=i) for i in range(2)]
    fast += [record(budget=16, speed=s, sample=i) for i, s in enumerate((40.0, 50.0))]
    rows = compare(default_pairs(collect(slow + fast)))
    (row,) = [c for c in rows if c.b.method == "ddtree" and c.scope == "gsm8k"]
    assert row.n == 2
    assert row.delta_pct == pytest.approx(100 * ((4 + 5) / (2 + 4) - 1))
    assert not [c for c in rows if "ar" in (c.a.method, c.b.method) and c.a_run != c.b_run]


def test_group_rows_of_a_comparison_pool_the_prompts():
    series = collect(
        [record(speed=20.0, sample=i) for i in range(3)]
        + [record(speed=50.0, dataset="math500")]
        + [record("domino", speed=10.0, sample=i) for i in range(3)]
        + [record("domino", speed=10.0, dataset="math500")]
    )
    (row,) = [c for c in compare(default_pairs(series)) if c.scope == "math"]
    assert (row.n, row.delta_pct) == (4, pytest.approx(100 * (110 / 40 - 1)))


def test_a_single_prompt_has_a_difference_but_no_interval():
    row = compare(default_pairs(collect([record(speed=20.0), record("domino", speed=10.0)])))[0]
    assert (row.n, row.delta_pct, row.ci_low, row.ci_high) == (1, pytest.approx(100.0), None, None)


def test_intervals_do_not_depend_on_what_else_is_compared():
    rng = np.random.default_rng(0)
    samples = [(rng.uniform(1, 2, n), rng.uniform(1, 2, n)) for n in (30, 30, 50)]
    together = bootstrap_intervals(samples, resamples=2000)
    assert bootstrap_intervals(samples[1:2], resamples=2000) == [pytest.approx(together[1], rel=1e-12)]
    assert bootstrap_intervals(samples, resamples=2000, seed=1) != together


def test_intervals_agree_with_a_plain_bootstrap():
    rng = np.random.default_rng(3)
    x = rng.gamma(4, 10, 60)
    y = x * rng.uniform(0.7, 1.1, 60)
    draws = rng.integers(0, 60, (10_000, 60))
    deltas = 100 * (x[draws].mean(1) / y[draws].mean(1) - 1)
    assert bootstrap_intervals([(x, y)])[0] == pytest.approx(np.percentile(deltas, [2.5, 97.5]), abs=0.3)


def test_prompts_without_speed_are_no_division_by_zero():
    series = collect([record(speed=5.0), record("domino", speed=0.0), record("ar", speed=0.0)])
    assert cell(cells(series), method="dominotree", dataset="gsm8k").speedup is None
    assert compare(default_pairs(series)) == []


def test_many_budgets_are_cut_to_same_budget_pairs_and_the_best_of_each_method():
    budgets = (4, 8, 16, 32, 64, 128, 256, 512)
    series = collect(
        [record("ar"), record("domino")]
        + [record(m, b, speed=float(b)) for m in ("ddtree", "dominotree") for b in budgets]
    )
    pairs = {(a.configuration, b.configuration) for a, b in default_pairs(series)}
    for budget in budgets:
        assert (Configuration("dominotree", budget), Configuration("ddtree", budget)) in pairs
        assert (Configuration("dominotree", budget), Configuration("ar")) in pairs
    assert (Configuration("dominotree", 8), Configuration("ddtree", 4)) not in pairs
    assert (Configuration("dominotree", 512), Configuration("domino")) in pairs
    few = default_pairs([s for s in series if s.configuration.budget in (None, 4, 8)])
    assert len(few) == 6 * 5 // 2
    assert {s.configuration.budget for s in best_budgets(series)} == {None, 512}


def test_variants_are_compared_with_what_they_vary_and_with_their_own_ar():
    series = collect(
        [record("ar", speed=10.0), record("ar", speed=5.0, variant="eager")]
        + [record(budget=16, speed=20.0)]
        + [record(m, 16, speed=20.0, variant="eager") for m in ("marginal", "dominotree")]
        + [record(budget=16, speed=30.0, variant="M=8")]
    )
    found = cells(series)
    assert cell(found, method="dominotree", variant="eager", dataset="gsm8k").speedup == 4.0
    assert cell(found, method="dominotree", variant="M=8", dataset="gsm8k").speedup == 3.0
    assert {c.configuration.variant for c in found if c.configuration.method == "dominotree"} == {
        None,
        "eager",
        "M=8",
    }
    labels = {(a.configuration.label, b.configuration.label) for a, b in ablation_pairs(series)}
    assert labels == {
        ("ar (eager)", "ar"),
        ("dominotree@16 (eager)", "dominotree@16"),
        ("dominotree@16 (M=8)", "dominotree@16"),
        ("dominotree@16 (eager)", "marginal@16 (eager)"),
    }
    assert all(s.configuration.variant is None for pair in default_pairs(series) for s in pair)


def test_acceptance_by_depth_counts_draft_tokens_only():
    shares = acceptance_by_depth([record(accepted=[1, 2, 4]), record(accepted=[1])])
    assert shares.tolist() == [0.5, 0.25, 0.25]
    assert acceptance_by_depth([record()]).size == 0
    assert acceptance_by_depth([record(accepted=[1, 1])]).size == 0


def test_stage_times_are_means_over_prompts_that_have_them():
    times = stage_times([record(stage_ms={"draft": 1.0}), record(stage_ms={"draft": 3.0}), record()])
    assert times == {"draft": 2.0}
    assert stage_times([record()]) == {}


def test_curves_over_budget_and_width_are_in_rising_order():
    series = collect(
        [record(budget=b) for b in (64, 4, 16)]
        + [record(budget=16, variant=f"M={m}") for m in (64, 0, 8)]
        + [record("ddtree", 8)]
    )
    found = cells(series)
    (budgets,) = budget_curves(found).values()
    assert [c.configuration.budget for c in budgets] == [4, 16, 64]
    (widths,) = width_curves(found).values()
    assert [width for width, _ in widths] == [8, 64, 0]


def test_endings_tell_answers_that_stopped_from_answers_cut_off():
    ended = (("stop", 2.0), ("length", 4.0), ("stop", 3.0), ("error", 9.0), (None, 9.0))
    how = endings(record(finish_reason=reason, tau=tau) for reason, tau in ended)
    assert (how.n, how.stop_share, how.length_share) == (4, 0.5, 0.25)
    assert (how.stop_tau, how.length_tau) == (2.5, 4.0)
    assert endings([record()]) is None


def test_reliability_pools_depths_by_their_nodes():
    bins = [CalibrationBin("a", 0, 30, 0.95, 0.9), CalibrationBin("a", 1, 10, 0.91, 0.5)]
    (pooled,) = reliability(bins)["a"]
    assert pooled.n == 40
    assert pooled.mean_predicted == pytest.approx(0.94)
    assert pooled.accepted_rate == pytest.approx(0.8)
    assert calibration_error([pooled]) == pytest.approx(0.14)
