"""vLLM in this process, on one thread, with a small cache."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("vllm") is not None:  # the settings are read when it is imported
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target; imported here, since the module needs vLLM's environment."""
    from engines.vllm.host import write_target

    return write_target(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="session")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter for it."""
    from engines.vllm.host import write_drafter

    return write_drafter(tmp_path_factory.mktemp("models") / "drafter")
