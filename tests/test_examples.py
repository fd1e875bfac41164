"""The examples run, and show what they say."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import dominotree as dt
from serve.conftest import tiny_pair

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(file.stem for file in EXAMPLES.glob("*.py"))


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> str:
    """What the example named by the parameter prints, with a tiny pair in place of the default one."""
    pair = tiny_pair()
    monkeypatch.setattr(dt, "load", lambda *_, **__: pair)
    runpy.run_path(str(EXAMPLES / f"{request.param}.py"), run_name="__main__")
    return capsys.readouterr().out


def example(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("output", [name], indirect=True)


@example("generate")
def test_generate_answers_one_and_several(output: str) -> None:
    assert re.search(r"\d+ tokens, \d+ passes, \d\.\d\d tokens a pass", output)
    assert all(question in output for question in ("Name a fruit.", "Name a river.", "Name a planet."))


@example("stream_chat")
def test_a_later_turn_reuses_the_earlier_one(output: str) -> None:
    reused = [int(count) for count in re.findall(r"\[(\d+) of \d+ prompt tokens were there", output)]
    assert len(reused) == 2 and reused[1] > reused[0]


@example("compare_methods")
def test_every_method_gives_plain_decodings_tokens(output: str) -> None:
    rows = [line.split() for line in output.splitlines()[1:]]
    assert [row[0] for row in rows] == [name for name, method in dt.METHODS.items() if method.rule == "fixed"]
    assert [row[-1] for row in rows] == ["-"] + ["yes"] * (len(rows) - 1)


@example("seeded_sampling")
def test_a_seed_fixes_the_tokens(output: str) -> None:
    first, second = (line.partition(": ")[2] for line in output.splitlines() if line.startswith("seed"))
    assert first != second
    assert output.count(" same tokens") == 8 and "OTHER" not in output


@example("openai_client")
def test_the_client_gets_an_answer_and_a_stream(output: str) -> None:
    answer, streamed = re.split(r"\n\d+\.\d\d tokens a pass\n", output)
    assert answer.strip() and streamed.strip()


def test_the_notebook_runs_and_is_kept_without_outputs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [cell for cell in json.loads((EXAMPLES / "tour.ipynb").read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    pair = tiny_pair()
    monkeypatch.setattr(dt, "load", lambda *_, **__: pair)
    names: dict[str, object] = {}
    for cell in cells:
        exec("".join(cell["source"]), names)
    output = capsys.readouterr().out
    assert "identical: True" in output and "[True, True, True]" in output and "added by the model:" in output


@pytest.mark.slow
@pytest.mark.pair
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_run_on_the_default_pair(name: str) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py"], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "OTHER" not in done.stdout
