"""Every `dominotree` command that the documentation shows runs, page by page and in order, on a tiny pair."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.conftest import Run, bare, dflash_drafter, drafter, model
from cli.test_train import CONFIG
from dominotree import hub
from dominotree.bench import datasets
from test_docs import BLOCKS, commands, name_of

__all__ = ["bare", "dflash_drafter", "drafter", "model"]

SHORTER = {
    "generate": ["--max-new-tokens", "8"],
    "chat": ["--max-new-tokens", "8"],
    "trace": ["--max-new-tokens", "8"],
    "batch": ["--max-new-tokens", "8"],
    "bench": ["--limit", "1", "--max-new-tokens", "6"],
    "report": ["--resamples", "20"],
    "profile": ["--repeats", "1", "--contexts", "8"],
    "tune": ["--prompts", "1", "--max-new-tokens", "8"],
    "plan": ["--requests", "20"],
    "doctor": ["--max-new-tokens", "8"],
    "audit": ["--max-new-tokens", "8"],
    "serve": ["--port", "0"],
    "train collect": ["--max-new-tokens", "24"],
    "train fit": ["--config", "tiny.toml", "--steps", "2", "--held-out", "2"],
    "train eval": ["--limit", "2", "--max-new-tokens", "8"],
}
"""What is added to a command so that it does less of the same; the last value of an option counts."""

INPUT = {"chat": "hello\n/stats\n/quit\n", "generate": "some notes\n"}
FINDS = {"doctor": {0, 1}}
"""Commands that may well find something, and then exit with another status."""

BY_PAGE: dict[str, list[list[str]]] = {}
for block in BLOCKS:
    if block.language in ("", "bash", "sh", "console"):
        BY_PAGE.setdefault(name_of(block.page), []).extend(commands(block.text, "dominotree"))


@pytest.fixture
def _tiny(
    model: Path, drafter: Path, dflash_drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Every name of a model means a tiny one, every set of prompts those that ship here; nothing listens for long."""

    def named_drafter(name: str, **_: object) -> Path:
        if Path(name).is_dir():
            return Path(name)
        return dflash_drafter if name.endswith("-dflash") else drafter

    chat = datasets._load("builtin-chat", None)
    monkeypatch.setattr(hub, "resolve_target", lambda *_, **__: model)
    monkeypatch.setattr(hub, "resolve_drafter", named_drafter)
    monkeypatch.setattr(datasets, "_load", lambda name, _: datasets.PromptSet(name, chat.samples, chat.source))
    monkeypatch.setattr("dominotree.serve.run.serve", lambda *_, **__: None)
    monkeypatch.setenv("DOMINOTREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("some notes\n")
    Path("tiny.toml").write_text(CONFIG)
    yield


@pytest.mark.parametrize("page", [page for page, calls in sorted(BY_PAGE.items()) if calls])
@pytest.mark.usefixtures("_tiny")
def test_the_commands_of_a_page_run(bare: Run, page: str) -> None:
    form = (lambda text: {"turns": [text]}) if page == "docs/doctor.md" else (lambda text: {"prompt": text})
    Path("prompts.jsonl").write_text("".join(json.dumps(form(f"say {n}")) + "\n" for n in range(6)))
    for call in BY_PAGE[page]:
        name = " ".join(call[:2]) if call[0] == "train" else call[0]
        Path("answers.jsonl").unlink(missing_ok=True)
        result = bare(*call, *([] if "--help" in call else SHORTER.get(name, [])), input=INPUT.get(name))
        if "--ray" in call:  # which has an environment and tests of its own
            assert result.exit_code == 2 and "dominotree[ray]" in result.stderr
        else:
            assert result.exit_code in FINDS.get(name, {0}), f"dominotree {' '.join(call)}: {result.output}"
