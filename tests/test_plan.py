"""Simulated fleets: nothing is lost, and what they show is what profile and acceptance say where that can be told."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("simpy", reason="needs simpy; pip install 'dominotree[plan]'")

from cli.conftest import Run, bare
from dominotree.bench.records import Record
from dominotree.costs import CostModel
from dominotree.decode import Decoder
from dominotree.errors import InvalidRequest
from dominotree.generation import Request
from dominotree.methods import Drafting
from dominotree.plan import Acceptance, Fleet, Load, Outcome, Prompt, simulate
from dominotree.sampling import SamplingParams
from oracle import tiny_drafter
from targets.tiny import tiny_target

__all__ = ["bare"]

ROWS = [1, 2, 4, 8, 16, 32, 64]


def profile(*, row_ms: float = 0.3, by_context: float = 0.0) -> CostModel:
    """A pass costs 10 ms and `row_ms` a row."""
    contexts = [64, 512]
    curves = [[10 + row_ms * rows + by_context * context for rows in ROWS] for context in contexts]
    return CostModel(
        key={"target": "t", "drafter": [2, 6], "dtype": "float32", "device": "cpu", "processor": "p", "threads": 1},
        contexts=contexts,
        rows=ROWS,
        verify_ms=curves,
        stepped_ms=curves,
        depths=[16],
        draft_ms=[[3.0], [3.0]],
        build_ms=[0.5 + 0.01 * rows for rows in ROWS],
        rest_ms=0.25,
        verify_each_ms=[0.2, 0.2 + 448 * by_context],
        draft_each_ms=[0.1, 0.1],
        measured_ms=[],
    )


def recorded(lists: Sequence[Mapping[int, Sequence[int]]], **options: Any) -> Acceptance:
    prompts = [Prompt(40 + 7 * i, 1 + sum(each[16]), {0: [1], **each}) for i, each in enumerate(lists)]
    return Acceptance(prompts, [0, 4, 16], **options)


THREE = recorded([{4: [2, 1, 3], 16: [4, 2, 1, 5]}, {4: [1, 1, 2, 1], 16: [3, 1, 1]}, {4: [5], 16: [6, 6, 2]}])


def served(
    budget: int, load: Load, *, costs: CostModel | None = None, acceptance: Acceptance = THREE, **fleet: Any
) -> Outcome:
    return simulate(Fleet(costs or profile(), acceptance, budget, **fleet), load)


@pytest.mark.parametrize("load", [Load(rate=2), Load(rate=500), Load(clients=1), Load(clients=9)])
@pytest.mark.parametrize("budget", [0, 4, 16])
def test_every_request_is_answered_whole(load: Load, budget: int) -> None:
    load = replace(load, requests=40, prompt=(1, 600), answer=(1, 50), seed=3)
    outcome = served(budget, load, replicas=2, max_batch=3)
    plain = served(0, replace(load, rate=1, clients=None))
    assert list(outcome.tokens) == list(plain.tokens)  # what was asked for does not depend on the fleet
    assert list(outcome.prompt_tokens) == list(plain.prompt_tokens)
    assert len(outcome.tokens) == 40 and set(map(type, outcome.tokens)) == {int}
    assert min(outcome.tokens) >= 1 and max(outcome.tokens) <= 50 and max(outcome.prompt_tokens) <= 600
    assert all(0 < first <= end for first, end in zip(outcome.first_token, outcome.finished, strict=True))
    assert 0 < outcome.busy <= 1 and outcome.batch <= 3


@pytest.mark.parametrize("budget", [0, 4, 16])
def test_a_lone_client_gets_what_profile_and_acceptance_predict(budget: int) -> None:
    costs, lists = profile(), {4: [2, 1, 3], 16: [4, 2, 1, 5]}
    tokens = 1 + 12 * 5  # whole turns through either list
    outcome = served(
        budget, Load(clients=1, requests=4, prompt=(64, 64), answer=(tokens, tokens)), acceptance=recorded([lists])
    )
    each = costs.round(budget, 64)[-1] if budget else costs.verify(1, 64)[0]
    per_round = sum(lists[budget]) / len(lists[budget]) if budget else 1
    decoding = (tokens - 1) / per_round * each / 1000
    encoding = float(costs.verify(64, 0)[-1]) / 1000
    assert outcome.tau == pytest.approx(per_round)
    assert list(outcome.finished) == pytest.approx([encoding + decoding] * 4)
    assert list(outcome.first_token) == pytest.approx([encoding + each / 1000] * 4)  # seen when its step ends
    assert outcome.tokens_per_s == pytest.approx(tokens / (encoding + decoding))
    assert outcome.busy == pytest.approx(1)


def test_a_round_of_one_costs_what_the_profile_says_and_budget_0_is_plain_decoding() -> None:
    costs = profile(by_context=0.01)
    for context in (64, 256, 512):
        plain, trees = Fleet(costs, THREE, 0), Fleet(costs, THREE, 16, max_rows=15)
        for sequences in (1, 5):  # plainly a round is the pass and nothing else
            verify = costs.verify(sequences, context, sequences)[-1]
            assert plain.round(sequences, context) == pytest.approx((0, verify))
        assert trees.round(1, context) == pytest.approx((16, costs.round(16, context)[-1]))
        verify = costs.verify(15, context)[-1] + 4 * (0.2 + (context - 64) * 0.01)
        drafting = costs.draft(context) + 4 * 0.1 + 5 * costs.rest_ms + costs.build(5 * 16)
        assert trees.round(5, context) == pytest.approx((2, verify + drafting))


def test_more_load_never_lowers_throughput_and_never_shortens_a_request() -> None:
    for budget in (0, 16):
        outcomes = [served(budget, Load(rate=rate, requests=120)) for rate in (0.25, 0.5, 1, 2, 4)]
        speeds = [outcome.tokens_per_s for outcome in outcomes]
        waits = [sum(outcome.finished) for outcome in outcomes]
        assert speeds == sorted(speeds) and waits == sorted(waits)


def test_below_saturation_a_fleet_answers_as_much_as_arrives() -> None:
    outcome = served(16, Load(rate=0.5, requests=400, seed=1))
    assert len(outcome.tokens) / outcome.seconds == pytest.approx(0.5, rel=0.15)
    assert outcome.busy < 0.5


def test_twice_the_machines_answer_twice_as_much_when_there_is_more_than_enough() -> None:
    one, two = (served(4, Load(rate=10_000, requests=400), replicas=n).tokens_per_s for n in (1, 2))
    assert two == pytest.approx(2 * one, rel=0.05)


def test_the_outcome_depends_on_the_seed_alone() -> None:
    load = Load(rate=20, requests=60)
    assert served(16, load) == served(16, load)
    assert served(16, load).finished != served(16, replace(load, seed=1)).finished


def test_trees_are_cut_as_the_batch_grows_where_rows_cost() -> None:
    dear, free = Fleet(profile(row_ms=2), THREE, 16), Fleet(profile(row_ms=0), THREE, 16)
    cut = [dear.round(n, 64)[0] for n in (1, 2, 8, 32)]
    assert cut == sorted(cut, reverse=True) and cut[0] == 16 and cut[-1] < 4
    assert [free.round(n, 64)[0] for n in (1, 8, 32)] == [16, 16, 16]


def test_a_busy_round_goes_without_a_draft_that_does_not_pay() -> None:
    costs = replace(profile(row_ms=2), draft_ms=[[30.0], [30.0]], draft_each_ms=[30.0, 30.0])
    fleet = Fleet(costs, THREE, 16)
    assert fleet.round(1, 100)[0] == 16  # as the server: alone a sequence drafts what it was asked to
    assert fleet.round(4, 64) == (0, costs.plain(64, 4))
    assert Fleet(costs, THREE, 16, max_rows=20).round(4, 64)[0] == 4


def test_rows_that_are_given_bound_a_round_of_several() -> None:
    fleet = Fleet(profile(row_ms=0), THREE, 16, max_rows=20)
    assert [fleet.round(n, 64)[0] for n in (1, 2, 10, 20, 30)] == [16, 9, 1, 0, 0]


def test_trees_stop_paying_where_rows_cost_and_go_on_where_they_are_free() -> None:
    few, many = Load(clients=1, requests=60), Load(clients=64, requests=120)
    for row_ms, pays in ((2.0, False), (0.0, True)):
        costs = profile(row_ms=row_ms)
        alone = [served(budget, few, costs=costs).tokens_per_s for budget in (0, 16)]
        full = [served(budget, many, costs=costs, max_batch=32).tokens_per_s for budget in (0, 16)]
        assert (full[1] > full[0]) is pays
        assert row_ms or alone[1] > alone[0]


def test_a_replica_steps_as_the_decoder_does() -> None:
    target = tiny_target(max_position_embeddings=1024)
    request = Request(
        [i % 90 + 4 for i in range(300)],  # two chunks
        SamplingParams(max_new_tokens=30, ignore_eos=True),
        Drafting("dominotree", 4),
    )
    decoder, batches = Decoder(target, tiny_drafter(target), slots=2, context=512, max_nodes=4), []
    whole_round = decoder._round
    decoder._round = lambda batch, watch: (batches.append(len(batch)), whole_round(batch, watch))[1]  # type: ignore[method-assign,assign]
    answers = decoder.run([request] * 5)
    lists = answers[0].stats.accepted
    outcome = served(
        4,
        Load(clients=5, requests=5, answer=(30, 30)),
        acceptance=Acceptance([Prompt(300, 30, {0: [1], 4: lists})], [0, 4]),
        max_batch=2,
        max_rows=1000,
    )
    assert outcome.batch == pytest.approx(sum(batches) / len(batches))
    assert outcome.batch < 2 and len(set(batches)) == 2  # one of the five is alone at the end
    assert outcome.tau == pytest.approx(answers[0].stats.mean_accepted)


# From records


def record(budget: int, sample: int, accepted: Sequence[int], **changes: Any) -> dict[str, Any]:
    return {
        "run": "r", "model": "m", "method": "dominotree", "budget": budget, "dataset": "d", "temperature": 0.0,
        "sample": sample, "turn": 0, "new_tokens": 1 + sum(accepted), "decode_s": 1.0, "tokens_per_s": 1.0,
        "mean_accepted": 1.0, "accepted": list(accepted), "prompt_tokens": 50, "prefill_s": 0.1, **changes,
    }  # fmt: skip


LISTS = [record(4, 0, [2, 1]), record(16, 0, [3, 1]), record(4, 1, [1]), record(16, 1, [4]), record(4, 2, [9])]


def test_acceptance_is_read_from_records_of_prompts_with_every_budget() -> None:
    found = Acceptance.of([Record.from_json(line) for line in LISTS], "dominotree")
    assert list(found.budgets) == [0, 4, 16]
    assert [dict(prompt.accepted) for prompt in found.prompts] == [
        {0: [1], 4: [2, 1], 16: [3, 1]},
        {0: [1], 4: [1], 16: [4]},
    ]
    assert [found.tau(n) for n in (0, 4, 10, 16)] == pytest.approx([1, 4 / 3, 2, 8 / 3])
    assert found.prefill_ms == pytest.approx(2)


@pytest.mark.parametrize(
    ("lines", "method", "named"),
    [
        (LISTS, "domino", "no records of trees by method domino"),
        ([*LISTS, record(4, 0, [1], temperature=1.0)], "dominotree", "several values of temperature"),
        ([record(4, 0, [1]), record(16, 1, [1])], "dominotree", "no prompt was recorded at every budget"),
        ([record(4, 0, [2, 0]), record(16, 0, [1])], "dominotree", "accepted 0 tokens in a round"),
    ],
)
def test_records_that_do_not_tell_enough_are_refused(lines: list[dict[str, Any]], method: str, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        Acceptance.of([Record.from_json(line) for line in lines], method)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    records, kept = tmp_path / "records.jsonl", tmp_path / "profile.json"
    records.write_text("".join(json.dumps(line) + "\n" for line in LISTS))
    profile(row_ms=2).save(kept)
    return records, kept


def test_the_command_prints_a_table_a_verdict_and_its_assumptions(bare: Run, files: tuple[Path, Path]) -> None:
    records, kept = files
    args = ("plan", records, "--profile", kept, "--clients", "1,16", "--requests", 30, "--answer", "20-40")
    text = bare(*args, "--price", 3)
    assert text.exit_code == 0, text.stderr
    rows = [line.split() for line in text.stdout.splitlines() if line.split()[:1] in (["1"], ["16"])]
    assert [row[:2] for row in rows] == [[load, budget] for load in ("1", "16") for budget in ("0", "4", "16")]
    assert all(part in text.stdout for part in ("per million", "sooner", "Assumed:"))
    found = json.loads(bare(*args, "--json").stdout)
    assert [one["requests"] for one in found["results"]] == [30] * 6
    assert found["results"][0]["cost_per_million"] is None and len(found["assumptions"]) >= 5
    assert found == json.loads(bare(*args, "--json").stdout)


def test_of_several_profiles_the_methods_own_is_taken(
    bare: Run, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOMINOTREE_CACHE", str(tmp_path))
    for name, drafter in (("domino", [3, 8, 8, 256, 8192]), ("dflash", [3, 8, 7, 0, 8192])):
        costs = profile(row_ms=2)
        replace(costs, key={**costs.key, "drafter": drafter}).save(tmp_path / "profiles" / f"{name}.json")
    args = ("plan", files[0], "--clients", "1", "--requests", 5, "--json")
    (tmp_path / "profiles" / "earlier.json").write_text("{}")  # of an earlier version
    found = json.loads(bare(*args).stdout)
    assert (found["profile"]["drafter"][3], found["method"]) == (256, "dominotree")
    replace(costs, key={**costs.key, "drafter": [3, 8, 8, 64, 8192]}).save(tmp_path / "profiles" / "other.json")
    (tmp_path / "profiles" / "domino.json").rename(tmp_path / "domino.json")
    alone = json.loads(bare(*args).stdout)
    assert alone["profile"]["drafter"][3] == 64  # the DFlash drafter's is none for this method
    (tmp_path / "domino.json").rename(tmp_path / "profiles" / "domino.json")
    result = bare(*args)
    assert result.exit_code == 2 and "name one with --profile" in result.stderr
    assert "domino.json" in result.stderr and "dflash.json" not in result.stderr


def test_cost_is_the_price_of_the_machines_for_the_time_a_million_tokens_takes() -> None:
    outcome = served(4, Load(rate=50, requests=50), replicas=3)
    assert outcome.cost(2.5) == pytest.approx(1e6 / outcome.tokens_per_s / 3600 * 3 * 2.5)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ((), "give --rate"),
        (("--rate", "1", "--clients", "1"), "not both"),
        (("--rate", "fast"), "numbers with commas"),
        (("--rate", ""), "numbers with commas"),
        (("--rate", "0"), "rate is 0"),
        (("--rate", "1", "--budget", "0,7"), "nothing was recorded at budget 7"),
        (("--rate", "1", "--prompt", "9-3"), "prompt is 9-3"),
        (("--rate", "1", "--prompt", "1000000000"), "from 1 to 1000000"),
        (("--rate", "1", "--temperature", "9"), "was recorded at temperature 0"),
        (("--rate", "1", "--answer", "some"), "LEAST-MOST is expected"),
        (("--rate", "1", "--replicas", "0"), "replicas is 0"),
        (("--rate", "1", "--method", "lookup"), "has no drafter"),
    ],
)
def test_wrong_use_is_one_line(bare: Run, files: tuple[Path, Path], args: tuple[str, ...], named: str) -> None:
    result = bare("plan", files[0], "--profile", files[1], *args)
    assert result.exit_code == 2 and named in result.stderr
    assert sum(line.startswith("Error:") for line in result.stderr.splitlines()) == 1


def test_a_profile_of_a_dflash_drafter_is_none_for_a_method_with_a_head(
    bare: Run, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOMINOTREE_CACHE", str(tmp_path))
    costs = profile(row_ms=2)
    replace(costs, key={**costs.key, "drafter": [3, 8, 7, 0, 8192]}).save(tmp_path / "profiles" / "dflash.json")
    result = bare("plan", files[0], "--clients", "1", "--requests", 5)
    assert result.exit_code == 2 and "--profile" in result.stderr
