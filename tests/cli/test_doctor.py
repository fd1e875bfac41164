"""`dominotree doctor`: what it prints, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.conftest import Run
from dominotree import doctor
from dominotree.doctor import Finding, Report


def test_a_drafter_of_no_use_exits_with_1_and_says_what_to_do(run: Run) -> None:
    result = run("doctor", "--max-new-tokens", 24)
    assert result.exit_code == 1
    text = " ".join(result.stdout.split())
    assert "ERROR tau-near-1: the drafter is hardly ever right" in text
    assert "how it is known: over" in text and "what to do: check that" in text
    assert "float32 on cpu" in text and "tokens/s" in text
    assert text.endswith("notes") or text.endswith("note")
    stages = result.stderr.splitlines()
    assert "the target answers ..." in stages
    assert stages.count("trying the drafter ...") < 3  # once for all settings, and again after more answers


def test_json_holds_every_finding_and_figure(run: Run) -> None:
    result = run("doctor", "--max-new-tokens", 24, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert set(found) == {"target", "drafter", "findings", "measured"}
    (error,) = (finding for finding in found["findings"] if finding["severity"] == "error")
    assert set(error) == {"name", "severity", "what", "known", "remedy", "figures"}
    assert error["figures"]["tried"] == len(found["measured"]["tried"])
    assert set(found["measured"]["speed"]) >= {"tokens_per_s", "plain_tokens_per_s", "speedup", "tau"}


@pytest.mark.parametrize(("severity", "code"), [("error", 1), ("warning", 0), ("note", 0)])
def test_only_an_error_fails(
    run: Run, monkeypatch: pytest.MonkeyPatch, severity: doctor.findings.Severity, code: int
) -> None:
    facts = {"dtype": "float32", "device": "cpu", "processor": "x", "threads": 1}
    report = Report("t", "d", [Finding("name", severity, "what", "known", "remedy")], facts)
    monkeypatch.setattr(doctor, "examine", lambda *_, **__: report)
    result = run("doctor")
    assert result.exit_code == code
    assert f"{severity.upper()} name: what" in result.stdout
    assert f"1 {severity}" in result.stdout.splitlines()[-1]


def test_prompts_of_ones_own_are_asked(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"turns": ["Hello?", "And?"]}\n{"turns": ["Bye."]}\n')
    asked: list[object] = []

    def examine(*_: object, **options: object) -> Report:
        asked.append(options["prompts"])
        return Report("t", None, measured={"dtype": "", "device": "cuda", "processor": ""})

    monkeypatch.setattr(doctor, "examine", examine)
    assert run("doctor", "--data", file).exit_code == 0
    assert asked == [["Hello?", "Bye."]]


@pytest.mark.parametrize(
    ("args", "code", "word"),
    [
        (["--method", "ar"], 2, "does not draft"),
        (["--method", "eagle"], 2, "eagle"),
        (["--data", "no-such-file.jsonl"], 2, "no-such-file"),
        (["--drafter", "no-such-drafter"], 1, "no-such-drafter"),
    ],
)
def test_wrong_use_is_one_line(run: Run, args: list[str], code: int, word: str) -> None:
    result = run("doctor", *args)
    assert result.exit_code == code
    errors = [line for line in result.stderr.splitlines() if not line.endswith(" ...")]
    assert len(errors) == 1 and errors[0].startswith("Error: ") and word in errors[0]
