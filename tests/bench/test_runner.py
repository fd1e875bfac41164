"""The benchmark loop: what is recorded, in which order, how it goes on, what is found out about outputs."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

import dominotree as dt
from cli.conftest import TEMPLATE, VOCAB, byte_tokenizer
from dominotree.bench import runner
from dominotree.bench.datasets import PromptSet, load_sets
from dominotree.bench.records import Record, read_records
from dominotree.bench.runner import Outcome, Plan, Progress, RunMismatch, check_drafters, describe, setups
from dominotree.bench.statistics import cells, collect
from dominotree.errors import InvalidRequest
from dominotree.pair import Output, Pair
from dominotree.text import TextCodec
from oracle import tiny_drafter
from targets.tiny import tiny_target

CHAT = PromptSet("chatty", (("Hello!", "And then?"), ("What is 2 + 2?",), ("One", "Two", "Three")), "here")
TASKS = PromptSet("tasks", (("Add.",), ("Subtract.",)), "here")
METHODS = ("ar", "domino", "dominotree")


@pytest.fixture(scope="module")
def pair() -> Pair:
    return make_pair()


def make_pair(*, exact: bool | None = True, context: int | None = None, dflash: bool = False) -> Pair:
    target = tiny_target("llama", vocab_size=VOCAB, max_position_embeddings=4096, exact=exact)
    codec = TextCodec(byte_tokenizer(), TEMPLATE, {"bos_token": "<|bos|>", "eos_token": "<|end|>"})
    plain = tiny_drafter(target, projector=None) if dflash else None
    return Pair(target, codec, tiny_drafter(target), plain, context=context, name="tiny")


def plan(**changes: Any) -> Plan:
    options: dict[str, Any] = {"setups": setups(METHODS, [4, 8]), "max_new_tokens": 12, "run": "r", "model": "tiny"}
    return Plan(**{**options, **changes})


def measure(
    pair: Pair,
    folder: Path,
    wanted: Plan | None = None,
    sets: tuple[PromptSet, ...] = (CHAT, TASKS),
    on_progress: Callable[[Progress], None] = lambda progress: None,
    **meta: Any,
) -> Outcome:
    wanted = wanted or plan()
    about = describe(pair, wanted, sets, {"limit": None, **meta}, {"domino": "d"})
    return runner.run(pair, wanted, sets, folder, about, on_progress)


def records(folder: Path) -> list[Record]:
    return list(read_records([folder]).records)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_every_turn_of_every_configuration_is_recorded_once(pair: Pair, tmp_path: Path) -> None:
    outcome = measure(pair, tmp_path, plan(temperatures=(0.0, 1.0)))
    found = records(tmp_path)
    assert outcome.records == len(found) == 8 * (2 + 1 + 3 + 1 + 1)
    assert outcome.compared and not outcome.differences and not outcome.skipped
    assert Counter((r.method, r.budget) for r in found) == {
        ("ar", None): 16, ("domino", None): 16, ("dominotree", 4): 16, ("dominotree", 8): 16
    }  # fmt: skip
    for record in found:
        assert record.rounds == len(record.accepted or ())
        assert record.new_tokens == 1 + sum(record.accepted or ())
        assert record.tokens_per_s == pytest.approx(record.new_tokens / record.decode_s)
        assert (record.candidates is None) == (record.budget is None)
        assert record.finish_reason in ("stop", "length")
        assert set(record.stage_ms or {}) == {"draft", "build", "verify", "commit"}
        assert record.mean_accepted >= 1


def test_all_methods_answer_alike_and_draws_differ_between_prompts(pair: Pair, tmp_path: Path) -> None:
    measure(pair, tmp_path, plan(temperatures=(1.0,)), (PromptSet("same", (("Go",), ("Go",)), "here"),))
    by_sample: dict[int, set[str | None]] = {}
    for record in records(tmp_path):
        by_sample.setdefault(record.sample, set()).add(record.output_sha256)
    assert all(len(digests) == 1 for digests in by_sample.values())
    assert by_sample[0] != by_sample[1]


def test_stages_add_up_to_decoding_and_with_prefill_to_wall_time(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walls: list[float] = []
    honest = runner.generate

    def timed(*args: Any, **options: Any) -> Output:
        start = time.perf_counter()
        output = honest(*args, **options)
        walls.append(time.perf_counter() - start)
        return output

    monkeypatch.setattr(runner, "generate", timed)
    measure(pair, tmp_path, plan(max_new_tokens=48), (TASKS,))
    found = records(tmp_path)
    for record, wall in zip(found, walls[-len(found) :], strict=True):
        assert record.stage_ms is not None and record.rounds and record.prefill_s
        staged = sum(record.stage_ms.values()) * record.rounds / 1000
        assert 0.5 * record.decode_s < staged < 1.01 * record.decode_s
        assert 0.5 * wall < record.prefill_s + record.decode_s < wall


def test_a_conversation_is_fed_its_own_answers(pair: Pair, tmp_path: Path) -> None:
    measure(pair, tmp_path, plan(setups=setups(["dominotree"], [4])), (CHAT,))
    talk = pair.chat(method="dominotree", budget=4, max_new_tokens=12)
    expected = []
    for text in CHAT.samples[2]:
        stream = talk.send(text)
        list(stream)
        expected.append(runner.output_digest(stream.output.token_ids))
    assert [r.output_sha256 for r in records(tmp_path) if r.sample == 2] == expected


def test_methods_take_turns_in_an_order_of_their_own_for_each_prompt(pair: Pair, tmp_path: Path) -> None:
    measure(pair, tmp_path)
    order: dict[tuple[str, int, int], list[tuple[str, int | None]]] = {}
    for record in records(tmp_path):
        order.setdefault((record.dataset, record.sample, record.turn), []).append((record.method, record.budget))
    assert all(len(configurations) == 4 for configurations in order.values())
    assert len({tuple(configurations) for configurations in order.values()}) > 2
    prompts = [(r.dataset, r.sample, r.turn) for r in records(tmp_path)]
    assert prompts == sorted(prompts, key=list(dict.fromkeys(prompts)).index), "a prompt is done before the next begins"


def test_each_configuration_warms_up_once_and_nothing_of_it_is_recorded(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    honest = runner.generate

    def spy(pair: Pair, ids: Any, sampling: Any, drafting: Any, **options: Any) -> Output:
        seen.append((drafting.method, drafting.budget, sampling.max_new_tokens))
        return honest(pair, ids, sampling, drafting, **options)

    monkeypatch.setattr(runner, "generate", spy)
    measure(pair, tmp_path, plan(max_new_tokens=20), (TASKS,))
    assert [length for *_, length in seen] == [runner.WARM_UP_TOKENS] * 4 + [20] * 8
    assert len(set(seen[:4])) == 4
    seen.clear()
    measure(pair, tmp_path, plan(max_new_tokens=20), (TASKS,))
    assert seen == []


class Killed(BaseException):
    """Stands for the process's end."""


def killed_after(count: int) -> Callable[[Progress], None]:
    def on_progress(progress: Progress) -> None:
        if progress.done >= count:
            raise Killed

    return on_progress


def test_a_killed_run_goes_on_where_it_was(pair: Pair, tmp_path: Path) -> None:
    measure(pair, tmp_path / "whole")
    expected = [(r.key, r.output_sha256, r.accepted) for r in records(tmp_path / "whole")]
    for at in (0, 6, 13, 29):
        folder = tmp_path / str(at)
        with pytest.raises(Killed):
            measure(pair, folder, on_progress=killed_after(at))
        begun = len((folder / runner.RECORDS_FILE).read_text().splitlines()) - 1
        assert begun == at
        outcome = measure(pair, folder)
        assert (outcome.resumed, outcome.records) == (at, 32)
        assert [(r.key, r.output_sha256, r.accepted) for r in records(folder)] == expected


def test_a_torn_last_line_is_measured_again(pair: Pair, tmp_path: Path) -> None:
    measure(pair, tmp_path)
    file = tmp_path / runner.RECORDS_FILE
    file.write_bytes(file.read_bytes()[:-40])
    for name in ("differences", "skipped"):
        (tmp_path / runner.CHECKS_FOLDER / f"{name}.jsonl").write_bytes(b'{"torn": ')
    outcome = measure(pair, tmp_path)
    assert (outcome.resumed, outcome.records) == (31, 32)
    assert not outcome.differences


def test_other_arguments_are_refused_by_name(pair: Pair, tmp_path: Path) -> None:
    measure(pair, tmp_path, sets=(TASKS,))
    before = (tmp_path / runner.RECORDS_FILE).read_bytes()
    with pytest.raises(RunMismatch, match=r"arguments\.limit None, and now it is 3"):
        measure(pair, tmp_path, sets=(TASKS,), limit=3)
    with pytest.raises(RunMismatch, match="run 'r', and now it is 's'"):
        measure(pair, tmp_path, plan(run="s"), (TASKS,))
    with pytest.raises(RunMismatch, match=r"max_new_tokens 12, and now it is 13"):
        measure(pair, tmp_path, plan(max_new_tokens=13), (TASKS,))
    other = PromptSet("tasks", (("Add.",), ("Multiply.",)), "here")
    with pytest.raises(RunMismatch, match=r"sets\.tasks\.sha256"):
        measure(pair, tmp_path, sets=(other,))
    assert (tmp_path / runner.RECORDS_FILE).read_bytes() == before


def test_records_of_someone_else_are_left_alone(pair: Pair, tmp_path: Path) -> None:
    measure(pair, tmp_path, sets=(TASKS,))
    file = tmp_path / runner.RECORDS_FILE
    file.write_text("".join(line + "\n" for line in file.read_text().splitlines()[1:]))
    with pytest.raises(RunMismatch, match="holds records that no bench made"):
        measure(pair, tmp_path, sets=(TASKS,))


def test_two_processes_do_not_write_to_one_folder(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / runner.CHECKS_FOLDER).mkdir()
    with FileLock(tmp_path / runner.CHECKS_FOLDER / ".lock"), pytest.raises(RunMismatch, match="another process"):
        measure(pair, tmp_path)


def test_a_file_in_the_place_of_the_folder_is_named(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunMismatch, match="file cannot be made a folder"):
        measure(pair, tmp_path / "file")


def test_the_meta_record_says_what_was_measured_on_what(pair: Pair, tmp_path: Path) -> None:
    measure(pair, tmp_path)
    (meta,) = read_records([tmp_path]).metas
    values = meta.values
    assert meta.runs == ("r",)
    assert {"dominotree", "torch", "transformers", "python"} <= set(values["versions"])
    assert values["versions"]["dominotree"] == dt.__version__
    assert {"cpu", "cores", "memory_gib"} <= set(values["hardware"])
    assert values["row_invariant"] is True
    assert values["template"] == "<|user|>user: {prompt}\n<|user|>assistant: "
    assert values["sets"]["chatty"]["turns"] == 6
    assert values["drafters"] == {"domino": "d"}
    assert {"threads", "dtype", "device", "seed", "arguments"} <= set(values)


@pytest.fixture
def forge(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes a method answer something else in the place given, as often as it is asked."""

    def install(method: str, position: int, temperature: float | None = None) -> None:
        honest = runner.generate

        def wrong(pair: Pair, ids: Any, sampling: Any, drafting: Any, **options: Any) -> Output:
            output = honest(pair, ids, sampling, drafting, **options)
            if drafting.method != method or temperature not in (None, sampling.temperature):
                return output
            tokens = list(output.token_ids)
            tokens[position] = (tokens[position] + 1) % 200 + 4
            return replace(output, token_ids=tokens, text=output.text + "!")

        monkeypatch.setattr(runner, "generate", wrong)

    yield install


@pytest.mark.parametrize("exact", [True, False])
def test_a_wrong_output_is_listed_as_a_bug_once_a_conversation(
    forge: Callable[..., None], tmp_path: Path, exact: bool
) -> None:
    pair = make_pair(exact=exact)
    forge("domino", 3)
    outcome = measure(pair, tmp_path, plan(temperatures=(0.0, 0.8)))
    assert len(outcome.bugs) == len(outcome.differences) == 2 * 5, "later turns of a parted conversation prove nothing"
    assert {(e["method"], e["position"], e["turn"]) for e in outcome.bugs} == {("domino", 3, 0)}
    entry = outcome.bugs[0]
    assert {"plain_token", "other_token", "margin", "logit_difference", "reason", "dataset", "temperature"} <= set(
        entry
    )
    listed = lines(outcome.checks / "differences.jsonl")
    assert listed == outcome.differences
    again = measure(pair, tmp_path, plan(temperatures=(0.0, 0.8)))
    assert again.differences == listed, "an earlier sitting's bugs still fail the run, and none is listed twice"
    assert "BUG: domino, chatty sample 0 turn 0 T=0, token 3, margin" in runner.describe_difference(entry)


def test_a_difference_is_found_when_the_run_was_killed_before_it_was_compared(
    pair: Pair, forge: Callable[..., None], tmp_path: Path
) -> None:
    forge("dominotree", 2)
    with pytest.raises(Killed):
        measure(pair, tmp_path, on_progress=killed_after(4))
    assert not lines(tmp_path / runner.CHECKS_FOLDER / "differences.jsonl")
    assert len(measure(pair, tmp_path).bugs) == 2 * 5


def test_answers_that_decode_differently_the_second_time_are_a_bug(pair: Pair, tmp_path: Path) -> None:
    measure(pair, tmp_path, sets=(TASKS,))
    file = tmp_path / runner.RECORDS_FILE
    text = file.read_text().splitlines()
    changed = json.loads(text[-1]) | {"output_sha256": "0" * 64}
    file.write_text("\n".join([*text[:-1], json.dumps(changed)]) + "\n")
    outcome = measure(pair, tmp_path, sets=(TASKS,))
    assert outcome.bugs
    assert {e["reason"] for e in outcome.bugs} == {"the recorded answers differ, and decoded again they do not"}


def test_prompts_beyond_the_context_are_listed_with_what_follows_them(tmp_path: Path) -> None:
    pair = make_pair(context=64)
    sets = (PromptSet("s", (("x" * 100, "more"), ("short", "y" * 100), ("short",)), "here"),)
    outcome = measure(pair, tmp_path, sets=sets)
    assert outcome.records == 4 * 2
    assert len(outcome.skipped) == 4 * 3
    reasons = {(e["sample"], e["turn"]): e["reason"] for e in outcome.skipped}
    assert reasons[0, 0].endswith("tokens and the context is 64")
    assert reasons[0, 1] == "turn 0 of this conversation was skipped"
    assert "context is 64" in reasons[1, 1]
    assert measure(pair, tmp_path, sets=sets).skipped == outcome.skipped


def test_a_run_of_nothing_but_skipped_prompts_ends_cleanly(tmp_path: Path) -> None:
    outcome = measure(make_pair(context=16), tmp_path, sets=(TASKS,))
    assert (outcome.records, len(outcome.skipped)) == (0, 8)


def test_one_token_is_prefill_and_leaves_a_valid_record_without_speed(pair: Pair, tmp_path: Path) -> None:
    outcome = measure(pair, tmp_path, plan(max_new_tokens=1))
    found = records(tmp_path)
    assert outcome.ended_at_once == len(found) == 32
    for record in found:
        assert (record.new_tokens, record.rounds, record.tokens_per_s) == (1, 0, 0.0)
        assert record.mean_accepted == 1.0
        assert record.stage_ms is None
    assert all(cell.speedup is None for cell in cells(collect(found)))


def test_progress_counts_turns_and_begins_where_the_run_does(pair: Pair, tmp_path: Path) -> None:
    seen: list[Progress] = []
    measure(pair, tmp_path, on_progress=seen.append)
    assert {p.total for p in seen} == {32}
    assert [p.done for p in seen] == sorted(p.done for p in seen)
    assert (seen[0].done, seen[-1].done) == (0, 32)
    seen.clear()
    measure(pair, tmp_path, on_progress=seen.append)
    assert {p.done for p in seen} == {32}


def test_what_a_method_does_not_have_does_not_multiply_it() -> None:
    made = setups(["ar", "dflash", "ddtree", "dominotree", "ar"], [4, 8, 4], [16, 0], [False, True])
    names = [(s.method, s.budget, s.variant) for s in made]
    assert names[:3] == [("ar", None, None), ("dflash", None, None), ("dflash", None, "noise-aware")]
    assert names[3:7] == [("ddtree", b, v) for b in (4, 8) for v in (None, "noise-aware")]
    assert [v for m, b, v in names if (m, b) == ("dominotree", 4)] == [
        "M=16", "M=16, noise-aware", "M=all", "M=all, noise-aware"
    ]  # fmt: skip
    assert len(set(names)) == len(names)
    assert [s.candidates for s in made if s.method == "ddtree"] == [None] * 4


def test_ablations_are_variants_of_conditional_trees_at_their_first_budget() -> None:
    both = ["reference-builder", "sampled-candidates"]
    made = setups(["ar", "static", "dominotree"], [4, 8], [16, 0], ablations=both)
    ablated = [setup for setup in made if setup.drafting.reference_builder or setup.drafting.sampled_candidates]
    assert [(one.method, one.budget, one.candidates, one.variant) for one in ablated] == [
        ("dominotree", 4, 64, "reference builder"),
        ("dominotree", 4, 64, "sampled candidates"),
    ]


def test_predictions_and_what_came_of_them_are_kept_for_the_largest_budget(pair: Pair, tmp_path: Path) -> None:
    measure(pair, tmp_path, plan(setups=setups(["ar", "domino", "dominotree"], [4, 8])), (TASKS,))
    bins = read_records([tmp_path]).calibration
    assert {one.label for one in bins} == {"r: dominotree@8 T=0"}
    found = [record for record in records(tmp_path) if record.budget == 8]
    drafted = sum(sum(record.accepted or []) - (record.rounds or 0) for record in found)
    # the last round's tokens may have been cut by the limit, so its accepted nodes are at most one a record more
    assert 0 <= sum(one.n * one.accepted_rate for one in bins) - drafted <= len(found) + 1e-6
    assert all(0 <= one.mean_predicted <= 1 and one.n > 0 for one in bins)


def test_noise_aware_drafting_is_measured_only_where_there_are_draws(pair: Pair, tmp_path: Path) -> None:
    both = setups(["ar", "dominotree"], [4], noise_aware=[False, True])
    outcome = measure(pair, tmp_path, plan(setups=both, temperatures=(0.0, 1.0)), (TASKS,))
    assert not outcome.differences
    assert Counter((r.temperature, r.variant) for r in records(tmp_path)) == {
        (0.0, None): 4, (1.0, None): 4, (1.0, "noise-aware"): 2
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"methods": ["magic"]}, "method 'magic' is unknown"),
        ({"methods": []}, "nothing to measure"),
        ({"budgets": []}, "nothing to measure"),
        ({"budgets": [-1]}, "budget is -1"),
        ({"candidates": [-1]}, "candidates is -1"),
        ({"ablations": ["magic"]}, "ablation 'magic' is unknown"),
        ({"ablations": ["magic"], "methods": ["ar"]}, "ablation 'magic' is unknown"),
        ({"ablations": ["reference-builder"], "methods": ["ar", "ddtree"]}, "name dominotree"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        setups(**{"methods": ["dominotree"], "budgets": [4], **options})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"temperatures": ()}, "no temperature"),
        ({"temperatures": (0.0, -1.0)}, "temperature is -1.0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"run": ""}, "run's name is empty"),
        ({"setups": setups(["dominotree"], noise_aware=[True])}, "name a temperature above 0"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        plan(**options)


def test_a_method_without_its_kind_of_drafter_is_an_error_not_a_gap(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="ddtree needs a DFlash drafter and only a Domino drafter"):
        measure(pair, tmp_path, plan(setups=setups(["ar", "ddtree"])))
    bare = Pair(pair.target, pair.codec)
    with pytest.raises(InvalidRequest, match="method domino needs a drafter"):
        check_drafters(bare, plan())
    check_drafters(bare, plan(setups=setups(["ar"])))
    only_dflash = Pair(pair.target, pair.codec, tiny_drafter(pair.target, projector=None))
    check_drafters(only_dflash, plan(setups=setups(["ar", "ddtree", "dflash"])))
    with pytest.raises(InvalidRequest, match="needs a Domino drafter"):
        check_drafters(only_dflash, plan(setups=setups(["domino"])))


def test_methods_of_both_kinds_of_drafter_share_a_run(tmp_path: Path) -> None:
    every = setups(["ar", "dflash", "ddtree", "domino", "marginal", "static", "dominotree"], [6])
    outcome = measure(make_pair(dflash=True), tmp_path, plan(setups=every, temperatures=(0.0, 0.7)), (TASKS,))
    assert outcome.records == 2 * 7 * 2
    assert not outcome.differences


@pytest.mark.pair
def test_the_default_pair_runs_the_prompts_that_ship_with_it(tmp_path: Path) -> None:
    pair = dt.load(progress=False)
    sets = load_sets(["builtin-code"], limit=1)
    outcome = measure(pair, tmp_path, plan(setups=setups(["ar", "dominotree"], [8])), tuple(sets))
    assert (outcome.records, outcome.bugs) == (2, [])
