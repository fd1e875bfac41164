"""One tiny target and its corpus for all training tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from train.tiny_run import greedy_corpus, write_target


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny target."""
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    """Folder of its greedy answers."""
    return greedy_corpus(tmp_path_factory.mktemp("corpus"), target)
