"""A cluster of two nodes on this machine, and a tiny pair in folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import bare, drafter, model, run

__all__ = ["bare", "drafter", "model", "run"]

TESTS = Path(__file__).parents[2]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two nodes of four logical CPUs, this process connected; `lose` ends the second as a crash would."""
    import ray
    from ray.cluster_utils import Cluster

    for name, value in (
        ("RAY_USAGE_STATS_ENABLED", "0"),
        ("OMP_NUM_THREADS", "1"),
        ("PYTHONPATH", f"{TESTS}:{os.environ.get('PYTHONPATH', '')}"),
    ):
        monkeypatch.setenv(name, value)
    size = {"num_cpus": 4, "object_store_memory": 100_000_000}
    made = Cluster(initialize_head=True, connect=False, head_node_args={**size, "include_dashboard": False})
    second = made.add_node(**size)
    made.wait_for_nodes()
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    made.second_id = second.node_id
    made.lose = lambda: made.remove_node(second, allow_graceful=False)
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()
