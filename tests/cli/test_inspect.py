"""`dominotree inspect`: one line a fact, or one JSON object."""

from __future__ import annotations

import json
from pathlib import Path

from cli.conftest import VOCAB, Run


def test_a_target_is_told_line_by_line(bare: Run, model: Path) -> None:
    result = bare("inspect", model)
    assert result.exit_code == 0
    told = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert (told["kind"], told["family"], told["layers"]) == ("target", "llama", "4")
    assert told["vocab"] == f"size                {VOCAB}"
    assert told["chat"] == "template             yes"
    assert "million parameters" in told["weights"] and "float32" in told["weights"]
    assert "None" not in result.stdout


def test_a_drafter_as_json(bare: Run, drafter: Path) -> None:
    found = json.loads(bare("inspect", drafter, "--json").stdout)
    assert (found["kind"], found["family"], found["target_layer_ids"]) == ("drafter", "Domino", [0, 2])


def test_a_pair_is_told_part_by_part(bare: Run) -> None:
    lines = bare("inspect", "llama3.1-8b").stdout.splitlines()
    assert "target" in lines
    assert any(line.split()[:2] == ["source", "meta-llama/Llama-3.1-8B-Instruct"] for line in lines)


def test_a_refused_checkpoint_is_no_failure_of_the_command(bare: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "weights.pt").write_text("")
    result = bare("inspect", tmp_path)
    assert result.exit_code == 0
    assert "refusal" in result.stdout and "weights.pt" in result.stdout


def test_a_name_that_leads_nowhere_is_one_line(bare: Run) -> None:
    result = bare("inspect", "no-such-name")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ") and "no-such-name" in line
