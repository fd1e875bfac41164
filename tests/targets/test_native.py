"""The C kernels as a library: what they keep of a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dominotree import native

SCRIPT = """
import os, torch
from dominotree import native
torch.set_num_threads(2)
def threads():
    return len(os.listdir("/proc/self/task"))
native.library()
before = threads()
logits = torch.randn(50_000)
native.library().dt_draw(logits.data_ptr(), 0, len(logits), 1.0, 7, 2)
busy = threads()
native.rest()
print(before, busy, threads())
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc, which is Linux's")
@pytest.mark.skipif(not native.available(), reason=f"no C kernels here: {native.reason()}")
def test_a_thread_can_let_its_team_go() -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=True)
    before, _busy, after = map(int, done.stdout.split())
    assert after == before
