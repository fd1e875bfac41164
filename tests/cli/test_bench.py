"""`dominotree bench`: its options, what it prints, how it ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from dominotree.bench import runner
from dominotree.cli.bench import bench
from dominotree.cli.common import OneLineErrors, comma_list
from dominotree.errors import InvalidRequest
from dominotree.pair import Output

app = typer.Typer(cls=OneLineErrors, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command("bench")(bench)
app.callback()(lambda: None)

Run = Callable[..., Result]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "one.jsonl").write_text('{"turns": ["Hello!", "More"]}\n{"turns": ["Bye"]}\n')
    (folder / "two.jsonl").write_text('{"turns": ["2 + 2?"]}\n')
    return folder


@pytest.fixture
def measure(tmp_path: Path, data: Path, model: Path, drafter: Path) -> Run:
    """Runs the command on the tiny pair and two small sets, into `tmp_path / "out"`."""

    def run(*args: object) -> Result:
        fixed = ["bench", "--target", model, "--drafter", drafter, "--dtype", "float32", "--exact"]
        sets = [] if "--data" in args or "--sets" in args else ["--data", data]
        length = [] if "--max-new-tokens" in args else ["--max-new-tokens", 8]
        out = [] if "--out" in args else ["--out", tmp_path / "out"]
        return CliRunner().invoke(app, [str(arg) for arg in (*fixed, *sets, *length, *out, *args)])

    return run


def recorded(tmp_path: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (tmp_path / "out" / "records.jsonl").read_text().splitlines()]
    return [values for values in found if "meta" not in values]


def test_a_run_records_prints_a_table_and_says_what_next(measure: Run, tmp_path: Path) -> None:
    result = measure("--methods", "ar,domino,dominotree", "--budget", "4,8", "--temperature", "0,1")
    assert result.exit_code == 0, result.stderr
    assert len(recorded(tmp_path)) == 4 * 4 * 2
    assert "Speedup over autoregressive decoding" in result.stdout
    assert result.stdout.count("dominotree@8") == 2
    assert "one" in result.stdout and "Overall" in result.stdout
    assert "lossless: every answer is plain decoding's" in result.stdout
    assert f"dominotree report {tmp_path / 'out'}" in result.stdout.replace("\n", "")
    assert {(values["run"], values["model"]) for values in recorded(tmp_path)} == {
        ("out", model_name(result, tmp_path))
    }


def model_name(result: Result, tmp_path: Path) -> str:
    first = (tmp_path / "out" / "records.jsonl").read_text().splitlines()[0]
    name = json.loads(first)["meta"]["model"]
    assert "/" not in name, "a folder's place on this machine is nobody's business"
    return str(name)


def test_the_same_command_goes_on_and_another_is_refused(measure: Run, tmp_path: Path) -> None:
    assert measure("--limit", 1).exit_code == 0
    file = tmp_path / "out" / "records.jsonl"
    file.write_text("".join(line + "\n" for line in file.read_text().splitlines()[:-2]))
    again = measure("--limit", 1)
    assert again.exit_code == 0
    assert "12 records, 10 of them from before" in again.stdout
    other = measure("--limit", 2)
    assert other.exit_code == 1
    assert other.stderr.count("\n") == 1
    assert "arguments.limit 1, and now it is 2" in other.stderr
    assert measure("--limit", 1, "--run", "else").stderr.count("run 'out', and now it is 'else'") == 1


def test_the_report_reads_the_folder(measure: Run, tmp_path: Path) -> None:
    from dominotree.cli import app as whole

    assert measure("--methods", "ar,dominotree", "--max-new-tokens", 24).exit_code == 0
    result = CliRunner().invoke(
        whole, ["report", str(tmp_path / "out"), "--out", str(tmp_path / "report"), "--resamples", "50"]
    )
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "report" / "report.html").exists()


def test_a_wrong_answer_is_listed_and_the_exit_code_is_three(measure: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = runner.generate

    def wrong(pair: Any, ids: Any, sampling: Any, drafting: Any, **options: Any) -> Output:
        output = honest(pair, ids, sampling, drafting, **options)
        return replace(output, token_ids=output.token_ids[:2]) if drafting.method == "domino" else output

    monkeypatch.setattr(runner, "generate", wrong)
    result = measure()
    assert result.exit_code == 3
    assert "BUG: domino, one sample 0 turn 0 T=0, token 2: domino ended too early" in result.stderr
    assert "NOT lossless: 3 answers" in result.stdout


def test_without_plain_decoding_nothing_is_compared_and_that_is_said(measure: Run) -> None:
    result = measure("--methods", "domino")
    assert result.exit_code == 0
    assert "ar is not among the methods" in result.stderr
    assert "lossless" not in result.stdout


def test_one_token_a_turn_is_no_speed_and_no_failure(measure: Run) -> None:
    result = measure("--max-new-tokens", 1)
    assert result.exit_code == 0, result.stderr
    assert "16 answers ended with their first token" in result.stderr


def test_prompts_beyond_the_context_are_counted(measure: Run) -> None:
    result = measure("--context", 8)
    assert result.exit_code == 0, result.stderr
    assert "16 turns skipped; see" in result.stderr
    assert "0 records" in result.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--methods", "ar,magic"), "method 'magic' is unknown"),
        (("--methods", ""), "--methods is ''; names with commas between are expected"),
        (("--budget", "4,x"), "--budget is '4,x'; integers"),
        (("--budget", "4,,8"), "--budget is '4,,8'"),
        (("--temperature", "warm"), "--temperature is 'warm'; numbers"),
        (("--temperature", "nan"), "temperature is nan"),
        (("--temperature", "-1"), "temperature is -1.0"),
        (("--candidates", "1.5"), "--candidates is '1.5'"),
        (("--limit", "0"), "limit is 0"),
        (("--max-new-tokens", "0"), "max_new_tokens is 0"),
        (("--sets", "gsm9k"), "set 'gsm9k' is unknown"),
        (("--data", "nowhere"), "the folder nowhere does not exist"),
        (("--noise-aware", "maybe"), "--noise-aware is 'maybe'; off, on, both"),
        (("--noise-aware", "on"), "name a temperature above 0"),
        (("--methods", "ar,ddtree"), "method ddtree needs a DFlash drafter"),
        (("--drafter", "none"), "needs a drafter"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(measure: Run, args: tuple[str, ...], says: str) -> None:
    result = measure(*args)
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_dflash_drafter_given_as_the_drafter_serves_its_methods(
    measure: Run, dflash_drafter: Path, tmp_path: Path
) -> None:
    result = measure("--drafter", dflash_drafter, "--methods", "ar,dflash,ddtree", "--limit", 1)
    assert result.exit_code == 0, result.stderr
    assert {values["method"] for values in recorded(tmp_path)} == {"ar", "dflash", "ddtree"}


def test_plain_decoding_alone_needs_no_drafter(measure: Run, tmp_path: Path) -> None:
    assert measure("--methods", "ar", "--drafter", "none", "--limit", 1).exit_code == 0
    assert len(recorded(tmp_path)) == 3


def test_lists_take_commas_and_spaces() -> None:
    assert comma_list("budget", "4, 8", int) == [4, 8]
    with pytest.raises(InvalidRequest):
        comma_list("budget", "4 8", int)
