"""What the nodes of the test cluster run; they find it through PYTHONPATH."""

from __future__ import annotations

import os
import time
from pathlib import Path

import ray

from dominotree.decode import Decoder
from dominotree.engines.ray import Options, Replica
from dominotree.methods import Drafting
from dominotree.pair import Pair, load


def load_slowly(target: str, drafter: str, traces: str, pause_s: float) -> tuple[Pair, Drafting]:
    """The pair, with rounds that take at least `pause_s`; leaves a file that tells on which node it was loaded."""
    node = ray.get_runtime_context().get_node_id()
    Path(traces, f"{node}-{os.getpid()}").touch()
    slow_rounds(pause_s)
    pair = load(target=target, drafter=drafter, dtype="float32", max_batch=2)
    return pair, pair.drafting()


def slow_rounds(pause_s: float) -> None:
    """From now on every round of this process takes longer."""
    step = Decoder.step

    def slowly(self: Decoder) -> None:
        time.sleep(pause_s)
        step(self)

    Decoder.step = slowly  # type: ignore[method-assign]


class SlowReplica(Replica):
    """A replica whose answers take long enough to be in the middle of something."""

    def __init__(self, options: Options) -> None:
        slow_rounds(0.04)
        super().__init__(options)
