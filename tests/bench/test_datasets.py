"""Prompts: where they come from, what becomes of rows, what is refused."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dominotree.bench.datasets import BUILTIN_SETS, HUB_SETS, DataUnavailable, load_sets, parse_samples, read_set
from dominotree.bench.statistics import GROUPS
from dominotree.errors import DominoTreeError, InvalidRequest

SHARED = Path(os.environ.get("DOMINOTREE_SHARED", Path(__file__).parents[3] / "shared")) / "data" / "bench"


def written(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return folder


def test_builtin_prompts_cover_three_kinds_and_hold_a_conversation() -> None:
    sets = load_sets(["builtin"])
    assert [s.name for s in sets] == list(BUILTIN_SETS)
    assert all(len(s.samples) == 12 for s in sets)
    assert any(len(turns) > 1 for s in sets for turns in s.samples)
    assert load_sets() == sets


def test_limit_takes_the_first_conversations_of_each_set() -> None:
    whole, cut = load_sets(["builtin"]), load_sets(["builtin"], limit=2)
    assert [s.samples for s in cut] == [s.samples[:2] for s in whole]
    assert [s.digest for s in cut] != [s.digest for s in whole]


def test_local_sets_are_files_named_after_them(tmp_path: Path) -> None:
    data = written(tmp_path, b='\ufeff{"turns": ["hi", "more"], "id": 3}\n\n{"turns": ["hé"]}', a='{"turns": ["x"]}\n')
    assert [s.name for s in load_sets(data=data)] == ["a", "b"]
    (only,) = load_sets(["b", "b"], data=data)
    assert only.samples == (("hi", "more"), ("hé",))
    assert only.turns == 3
    assert only == read_set(data / "b.jsonl")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "bad.jsonl:2: "),
        ("[1]", "bad.jsonl:2: a JSON list"),
        ('{"turn": ["x"]}', "bad.jsonl:2: 'turns' is missing"),
        ('{"turns": []}', "bad.jsonl:2: 'turns' is not a list"),
        ('{"turns": "x"}', "bad.jsonl:2: 'turns' is not a list"),
        ('{"turns": ["x", 3]}', "bad.jsonl:2: the turn 3 is no text"),
        ('{"turns": [" "]}', "bad.jsonl:2: the turn ' ' is no text"),
        ('{"turns": ["\\ud800"]}', "bad.jsonl:2: "),
        ("[" * 100_000, "bad.jsonl:2: "),
    ],
)
def test_a_malformed_line_is_named_by_file_and_line(line: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_samples(b'{"turns": ["fine"]}\n' + line.encode() + b"\n", "bad.jsonl")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_not_utf8_are_named_by_line() -> None:
    with pytest.raises(InvalidRequest, match="f:1: 'utf-8' codec"):
        parse_samples(b'{"turns": ["\xff"]}', "f")


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["gsm9k"], "set 'gsm9k' is unknown; gsm8k, math500"),
        (["builtin", "gsm9k"], "'gsm9k' is unknown"),
        (["math"], "the name of a group average"),
        ([], "no set is named"),
    ],
)
def test_unknown_sets_are_refused_before_anything_is_fetched(names: list[str], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        load_sets(names)


def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"holds no \.jsonl"):
        load_sets(data=tmp_path)
    data = written(tmp_path, empty="\n", one='{"turns": ["x"]}')
    with pytest.raises(InvalidRequest, match=r"empty.jsonl holds no prompt"):
        load_sets(["empty"], data=data)
    with pytest.raises(InvalidRequest, match=r"'two' has no file two\.jsonl in .*; sets there: empty, one"):
        load_sets(["two"], data=data)
    with pytest.raises(InvalidRequest, match="does not exist"):
        load_sets(data=tmp_path / "nowhere")
    for limit in (0, -1):
        with pytest.raises(InvalidRequest, match=f"limit is {limit}"):
            load_sets(["one"], data=data, limit=limit)


def test_the_eight_sets_of_the_protocol_are_known() -> None:
    assert tuple(HUB_SETS) == GROUPS["overall"]


class Rows(list[dict[str, Any]]):
    """What the package hands out, as far as it is used; shuffling turns the rows round."""

    def shuffle(self, seed: int) -> Rows:
        assert seed == 0
        return Rows(self[::-1])

    def select(self, places: range) -> Rows:
        return Rows(self[place] for place in places)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[tuple[Any, ...]]]:
    """Stands in for the package `datasets`; returns the list of what is asked of it."""

    def install(answer: Any) -> list[tuple[Any, ...]]:
        asked: list[tuple[Any, ...]] = []

        def load_dataset(*args: Any, **options: Any) -> Any:
            asked.append((*args, options))
            if isinstance(answer, Exception):
                raise answer
            return Rows(answer)

        fake = SimpleNamespace(load_dataset=load_dataset, __spec__=SimpleNamespace(name="datasets"))
        monkeypatch.setitem(sys.modules, "datasets", fake)
        return asked

    return install


@pytest.mark.parametrize(
    ("name", "row", "turns"),
    [
        ("gsm8k", {"question": "Q?"}, ("Q?\nPlease reason step by step, and put your final answer within \\boxed{}.",)),
        ("mbpp", {"prompt": "Write f."}, ("Write f.",)),
        ("mt-bench", {"prompt": ["a", "b"]}, ("a", "b")),
        ("alpaca", {"instruction": "I", "input": ""}, ("I",)),
        ("alpaca", {"instruction": "I", "input": "X"}, ("I\n\nInput:\nX",)),
        (
            "humaneval",
            {"prompt": "\ndef f():\n"},
            (
                "Write a solution to the following problem and make sure that it passes the tests:\n"
                "```python\n\ndef f():\n\n```",
            ),
        ),
    ],
)
def test_rows_of_the_hub_become_the_published_prompts(hub, name, row, turns) -> None:  # type: ignore[no-untyped-def]
    (asked,) = [hub([row])]
    (found,) = load_sets([name])
    assert found.samples == (turns,)
    assert found.source == HUB_SETS[name].repo == asked[0][0]


def test_fifty_prompts_are_taken_after_shuffling(hub) -> None:  # type: ignore[no-untyped-def]
    asked = hub([{"prompt": str(i)} for i in range(80)])
    (found,) = load_sets(["mbpp"])
    assert [turns[0] for turns in found.samples] == [str(i) for i in range(79, 29, -1)]
    assert asked == [("google-research-datasets/mbpp", "sanitized", {"split": "test"})]


def test_livecodebench_is_read_from_its_files_since_its_loader_is_a_script(hub) -> None:  # type: ignore[no-untyped-def]
    asked = hub([{"question_content": "Q", "starter_code": ""}, {"question_content": "Q", "starter_code": "class S:"}])
    (found,) = load_sets(["livecodebench"])
    (call,) = asked
    assert call[0] == "json"
    assert len(call[1]["data_files"]["test"]) == 6
    starter, plain = (turns[0] for turns in found.samples)
    assert "### Format: Use the following code structure:\n```python\nclass S:\n```\n\n### Answer" in starter
    assert "### Format: Write your code in the following format:\n```python\n# YOUR CODE HERE\n```" in plain


@pytest.mark.skipif(not SHARED.is_dir(), reason="the prepared prompts of the protocol are not here")
def test_livecodebench_prompts_are_those_of_the_prepared_file(hub) -> None:  # type: ignore[no-untyped-def]
    expected = read_set(SHARED / "livecodebench.jsonl")
    rows = []
    for (text,) in reversed(expected.samples):
        question, _, rest = text.partition("### Question:\n")[2].partition("\n\n### Format: ")
        code = rest.partition("```python\n")[2].partition("\n```\n\n### Answer")[0]
        rows.append({"question_content": question, "starter_code": "" if code == "# YOUR CODE HERE" else code})
    hub(rows)
    assert load_sets(["livecodebench"])[0].samples == expected.samples


@pytest.mark.skipif(not SHARED.is_dir(), reason="the prepared prompts of the protocol are not here")
def test_the_prepared_files_of_the_protocol_can_be_read() -> None:
    sets = load_sets(list(HUB_SETS), data=SHARED)
    assert [len(s.samples) for s in sets] == [30 if s.name == "aime25" else 50 for s in sets]
    assert {s.name for s in sets if s.turns > len(s.samples)} == {"mt-bench"}


def test_without_a_network_one_line_says_what_to_do(hub) -> None:  # type: ignore[no-untyped-def]
    hub(ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub\nand a second line"))
    with pytest.raises(DataUnavailable) as caught:
        load_sets(["gsm8k"])
    assert "openai/gsm8k cannot be fetched (ConnectionError: Couldn't reach" in str(caught.value)
    assert "--sets builtin" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_the_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dominotree.bench.datasets.find_spec", lambda name: None)
    with pytest.raises(DominoTreeError, match=r"pip install 'dominotree\[bench\]'"):
        load_sets(["gsm8k"])


def test_every_line_of_our_own_is_valid_json_with_only_turns() -> None:
    from dominotree.bench import datasets

    folder = Path(datasets.__file__).parent / "builtin"
    for file in folder.glob("*.jsonl"):
        for line in file.read_text(encoding="utf-8").splitlines():
            assert list(json.loads(line)) == ["turns"]
