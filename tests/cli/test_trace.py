"""`dominotree trace`: the file holds the answer of `generate`, round by round, and needs nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Run
from dominotree.pair import Pair
from dominotree.serve.trace_file import bundle, trace_file

SHORT = ("--max-new-tokens", 20, "--ignore-eos")


def data(file: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="trace">(.*?)</script>', file.read_text("utf-8"), re.DOTALL)
    assert found is not None
    made: dict[str, Any] = json.loads(found[1])
    return made


def ids(rounds: list[dict[str, Any]]) -> list[int]:
    return [token["id"] for entry in rounds for token in entry["tokens"]]


@pytest.mark.parametrize("options", [(), ("--temperature", 1), ("--method", "domino"), ("--budget", 5, "--raw")])
def test_the_file_holds_the_answer_of_generate(
    run: Run, bare: Run, model: Path, tmp_path: Path, options: tuple[Any, ...]
) -> None:
    file = tmp_path / "out.html"
    traced = run("trace", "hello", "-o", file, "--seed", 4, *SHORT, *options)
    assert traced.exit_code == 0, traced.stderr
    record = json.loads(run("generate", "hello", "--seed", 4, "--json", *SHORT, *options).stdout)
    plain_options = [option for option in options if option in ("--temperature", 1, "--raw")]
    plainly = ("--target", model, "--dtype", "float32", "--method", "ar", *plain_options)
    plain = bare("generate", "hello", "--seed", 4, "--json", *SHORT, *plainly)
    found = data(file)
    assert traced.stdout.rstrip("\n") == record["text"].rstrip("\n") == found["text"].rstrip("\n")
    assert ids(found["rounds"]) == record["token_ids"] == json.loads(plain.stdout)["token_ids"]
    assert len(found["rounds"]) == record["rounds"] + 1
    assert found["prompt"] == "hello" and "plain" not in found
    assert found["method"] == record["method"] and found["about"].endswith("float32 on cpu")
    assert traced.stderr.splitlines()[-1] == f"Wrote {file}"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.html"]


def test_compare_adds_plain_decoding_from_the_same_seed(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "out.html"
    assert run("trace", "hello", "-o", file, "--temperature", 1, "--compare", *SHORT).exit_code == 0
    found = data(file)
    assert ids(found["plain"]) == ids(found["rounds"])
    assert all(entry["nodes"] == [] for entry in found["plain"])


EARLIER = "<!doctype html><title>dominotree: an earlier one</title>"


def test_a_file_that_is_no_trace_is_not_written_over(bare: Run, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    result = bare("trace", "hello", "-o", prompts)
    assert result.exit_code == 2
    assert "something else than a trace" in result.stderr
    assert prompts.read_text() == '{"prompt": "hello"}\n'


def test_it_is_written_where_one_is_without_being_told(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.html").write_text(EARLIER)
    assert run("trace", "-", *SHORT, input="hello\n").exit_code == 0
    assert data(tmp_path / "trace.html")["prompt"] == "hello"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["-o", "."], "name of a file"),
        (["-o", "nowhere/trace.html"], "no folder nowhere"),
        (["--raw", "--system", "x"], "--system"),
        (["--method", "ar", "--compare"], "--compare"),
        (["--temperature", "-1"], "temperature"),
    ],
)
def test_wrong_use_is_one_line_before_anything_is_loaded(
    bare: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, args: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Pair, "__init__", None)
    result = bare("trace", "hello", *args)
    assert result.exit_code == 2
    assert says in result.stderr and len(result.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_the_earlier_file(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "out.html"
    file.write_text(EARLIER)

    def fails(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fails)
    assert run("trace", "hello", "-o", file, *SHORT).exit_code == 1
    assert file.read_text() == EARLIER
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.html"]


HOSTILE = "</script><!--<script> & \u2028 {data} \\1 <img src=x>"


def test_no_text_can_leave_its_place_in_the_file() -> None:
    made = {"prompt": HOSTILE, "about": HOSTILE, "method": "ar", "text": HOSTILE, "rounds": []}
    text = trace_file(made)
    found = re.search(r'<script type="application/json" id="trace">(.*?)</script>', text, re.DOTALL)
    assert found is not None and json.loads(found[1]) == made
    assert text.count("</script>") == 2 and text.count("<!--") == 0
    title = re.search(r"<title>(.*?)</title>", text)
    assert title is not None and "<" not in title[1]


def test_the_file_names_nothing_outside_itself() -> None:
    text = trace_file({"prompt": "p", "about": "", "method": "ar", "text": "", "rounds": []})
    assert not re.search(r'(src|href)="', text) and "@import" not in text and "url(" not in text
    assert set(re.findall(r"https?://[^\s\"'`]+", text)) <= {"http://www.w3.org/2000/svg"} | _in_regexes(text)
    script = bundle("trace")
    assert "import " not in re.sub(r"//[^\n]*|\"[^\"\n]*\"", "", script)
    assert not re.search(r"^export ", script, re.MULTILINE)


def _in_regexes(text: str) -> set[str]:
    """What looks like an address and is the pattern of one."""
    return {found for found in re.findall(r"https?://[^\s\"'`]+", text) if "[" in found}
