"""The load test itself: it runs, and it notices what it is there to notice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


LIE = "dominotree.Pair.generate = lambda *_, **__: type('Output', (), {'text': 'x', 'finish_reason': 'stop'})"
"""Another answer than the model's is expected."""


def load(*args: object, before: str = "") -> subprocess.CompletedProcess[str]:
    """Runs the script on the tiny pair in a process of its own."""
    given = ["--tiny", "--max-batch", "2", *map(str, args)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "benchmarks")}
    start = f"import serve_load\n{before}\nserve_load.main()"
    return subprocess.run([sys.executable, "-c", start, *given], capture_output=True, text=True, env=env, timeout=300)


def test_every_method_is_measured_on_the_same_requests(tmp_path: Path) -> None:
    done = load("--clients", "1,2", "--requests", 2, "--max-tokens", 12, "--json", tmp_path / "samples.json")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "samples.json").read_text())
    assert [(row["clients"], row["method"], len(row["samples"])) for row in rows] == [
        (1, "ar", 2),
        (1, "dominotree", 2),
        (2, "ar", 4),
        (2, "dominotree", 4),
    ]
    assert done.stdout.count("yes") == 4


def test_a_soak_ends_clean_and_a_wrong_answer_does_not_pass() -> None:
    sound = load("--soak", 4, "--clients", 6, "--max-tokens", 24)
    assert sound.returncode == 0, sound.stdout + sound.stderr
    assert "every completed answer is its solo answer" in sound.stdout
    spoilt = load("--soak", 4, "--clients", 6, "--max-tokens", 24, before=f"import dominotree; {LIE}")
    assert spoilt.returncode == 1 and "is not its solo answer" in spoilt.stdout
