"""`dominotree audit`: its table, its JSON, and its exit status."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Run
from dominotree.bench import audit as audit_module
from dominotree.bench.lossless import Difference
from dominotree.targets.decoder import DecoderTarget

FEW = ("--max-new-tokens", 12, "--temperature", "0,0.8")


def test_a_lossless_method_exits_with_0_and_says_so(run: Run) -> None:
    result = run("audit", "Hello?", "Why?", *FEW)
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines() if line.strip().startswith("float32")]
    assert [row[1:3] + row[4:7] for row in rows] == [["0", "2", "2", "0", "0"], ["0.8", "2", "2", "0", "0"]]
    assert result.stdout.splitlines()[-1] == "lossless: every answer is plain decoding's, token for token"
    assert "float32 at temperature 0 ..." in result.stderr


def test_fp32_is_audited_beside_ones_own_dtype(bare: Run, model: Path, drafter: Path) -> None:
    args = ("--target", model, "--drafter", drafter, "--dtype", "bfloat16", "--json")
    result = bare("audit", "Hello?", *args, *FEW)
    assert result.exit_code == 0, result.stdout
    found = json.loads(result.stdout)
    assert (found["method"], found["lossless"], found["bugs"]) == ("lookuptree", True, 0)
    kinds = [(one["dtype"], one["temperature"]) for one in found["comparisons"]]
    assert kinds == [(dtype, heat) for dtype in ("float32", "bfloat16") for heat in (0.0, 0.8)]
    assert set(found["comparisons"][0]) == {
        "dtype", "row_invariant", "temperature", "prompts", "tokens", "compared", "identical", "ties", "bugs",
        "differences",
    }  # fmt: skip


def test_a_bug_exits_with_3_and_is_placed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = DecoderTarget.forward

    def broken(self: DecoderTarget, cache: Any, segments: Any, **options: Any) -> Any:
        out = honest(self, cache, segments, **options)
        return replace(out, logits=out.logits.roll(1, dims=-1), best=()) if segments[0].parents else out

    monkeypatch.setattr(DecoderTarget, "forward", broken)
    result = run("audit", "A question that is longer than fits into the line?", *FEW)
    assert result.exit_code == 3
    assert result.stdout.splitlines()[-1].startswith("NOT lossless: 2 answers differ")
    (line, _) = (line for line in result.stdout.splitlines() if line.startswith("BUG: "))
    assert "temperature 0, 'A question that is longer than fits i...': token " in line
    assert "plainly and" in line and "margin" in line
    shown = run("audit", "Hello?", "--json", *FEW)
    assert shown.exit_code == 3
    found = json.loads(shown.stdout)
    assert (found["lossless"], found["bugs"]) == (False, 2)
    assert found["comparisons"][0]["differences"][0]["kind"] == "BUG"


def test_a_tie_is_shown_and_no_failure(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    tie = Difference(3, 7, 9, "tie", "the tokens lie 0 apart", 0.0)
    monkeypatch.setattr(audit_module, "first_difference", lambda *_, **__: tie)
    result = run("audit", "Hello?", "--temperature", 0, "--max-new-tokens", 8)
    assert result.exit_code == 0
    line = "tie: float32, temperature 0, 'Hello?': token 4 is 7 plainly and 9 drafted, margin 0: the tokens lie 0 apart"
    assert line in result.stdout.splitlines()
    assert result.stdout.splitlines()[-1].startswith("lossless but for rounding: 1 answers part")


def test_prompts_come_from_a_file_or_are_built_in(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def audit(pair: Any, prompts: Any, *_: Any, **__: Any) -> list[Any]:
        asked.append(len(prompts))
        return []

    monkeypatch.setattr(audit_module, "audit", audit)
    file = tmp_path / "mine.jsonl"
    file.write_text('{"turns": ["One?", "Two?"]}\n{"turns": ["Three?"]}\n{"turns": ["Four?"]}\n')
    for args in (["--data", file], ["--data", file, "--limit", 2], [], ["--limit", 1], ["a", "b", "c"]):
        assert run("audit", *args).exit_code == 0
    assert asked == [3, 2, 6, 3, 3]


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--method", "ar"], "ar"),
        (["--temperature", "0,hot"], "--temperature"),
        (["--temperature", "-1"], "temperature"),
        (["--max-new-tokens", "0"], "max_new_tokens"),
        (["--method", "domino", "--budget", "4"], "--budget has no effect"),
        ([""], "empty"),
        (["x", "--data", "file.jsonl"], "--data has no effect"),
        (["--data", "no-such-file.jsonl"], "no-such-file"),
        (["--limit", "0"], "--limit"),
    ],
)
def test_wrong_use_is_one_line_and_exit_2(run: Run, args: list[str], word: str) -> None:
    result = run("audit", *args)
    assert result.exit_code == 2
    errors = [line for line in result.stderr.splitlines() if not line.endswith(" ...")]
    assert len(errors) == 1 and errors[0].startswith("Error: ") and word in errors[0]


def test_a_target_without_a_drafter_cannot_be_audited(bare: Run, model: Path) -> None:
    result = bare("audit", "Hello?", "--target", model, "--dtype", "float32")
    assert result.exit_code == 2
    assert "--drafter" in result.stderr.splitlines()[-1]
