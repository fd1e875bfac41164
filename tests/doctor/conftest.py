"""One healthy tiny pair of each kind, to be broken by the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from doctor.healthy import write_drafter, write_target


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny target that speaks bytes."""
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def domino(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    """Folder of a Domino drafter for it whose every slot is a depth."""
    return write_drafter(tmp_path_factory.mktemp("domino"), target)


@pytest.fixture(scope="session")
def dflash(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    """Folder of a DFlash drafter for it whose first slot is the root's."""
    return write_drafter(tmp_path_factory.mktemp("dflash"), target, projector="none", shift_label=False)
