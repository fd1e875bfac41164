"""The command as a whole: instant help, its version, its list of methods."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from cli.conftest import Run
from dominotree import __version__
from dominotree.methods import METHODS

HEAVY = ("torch", "transformers", "tokenizers", "numpy", "matplotlib")


@pytest.mark.parametrize("args", [["--help"], ["generate", "--help"], ["chat", "-h"], ["--version"], []])
def test_help_and_version_load_nothing_heavy(args: list[str]) -> None:
    script = (
        "import sys\nfrom dominotree.cli import app\n"
        f"try:\n    app({args!r})\nexcept SystemExit as end:\n    assert not end.code\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_module_runs_as_the_command_does() -> None:
    done = subprocess.run([sys.executable, "-m", "dominotree", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"dominotree {__version__}\n")


def test_without_a_command_the_help_is_shown(bare: Run) -> None:
    result = bare()
    assert result.exit_code == 0
    assert all(name in result.stdout for name in ("generate", "chat", "methods", "report"))
    assert "demo" not in result.stdout


def test_an_unknown_command_is_one_line(bare: Run) -> None:
    result = bare("frobnicate")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: No such command 'frobnicate'")
    assert result.stderr.count("\n") == 1


def test_methods_lists_every_method_with_its_composition(bare: Run) -> None:
    text = bare("methods").stdout
    for method in METHODS.values():
        (line,) = (line for line in text.splitlines() if line.split()[:1] == [method.name])
        assert method.summary in line


def test_methods_as_json(bare: Run) -> None:
    found = json.loads(bare("methods", "--json").stdout)
    assert [entry["name"] for entry in found] == list(METHODS)
    assert set(found[0]) == {"name", "drafter", "score", "shape", "lookup", "budget", "summary"}
