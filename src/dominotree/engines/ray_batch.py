"""Batches on a Ray cluster: Ray Data hands blocks of lines to workers, and again to others where a node is lost."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when ray is imported; nobody was asked

import ray
import ray.data

from dominotree.batch import Job, Line, Record, records, room
from dominotree.errors import DominoTreeError
from dominotree.machine import usable_cpus
from dominotree.methods import Drafting
from dominotree.pair import Pair

ROUNDS_OF_A_BLOCK = 4
"""Lines that a worker gets at once, in batches: fewer come sooner and are lost less, more leave fewer slots idle."""

Load = Callable[[], tuple[Pair, Drafting]]


class Worker:
    """A model in a process of its own, which decodes blocks of lines."""

    def __init__(self, load: Load, job: Job) -> None:
        self._job, self._fault = job, ""
        try:
            self._pair, self._drafting = load()
        except DominoTreeError as error:  # raised here it would be tried again without end
            self._fault = str(error)

    def __call__(self, block: dict[str, Any]) -> dict[str, Any]:
        """A block's records as JSON, or what is wrong with the worker."""
        lines = [Line(int(number), text) for number, text in zip(block["number"], block["text"], strict=True)]
        try:
            if self._fault:
                raise DominoTreeError(self._fault)
            decoder = room(self._pair, lines, self._job, self._drafting)
        except DominoTreeError as error:
            return {"record": [""], "fault": [str(error)]}
        found = [json.dumps(r) for r in records(self._pair, lines, self._job, self._drafting, decoder)]
        return {"record": found, "fault": [""] * len(found)}


def spread(
    load: Load,
    lines: Iterable[Line],
    job: Job,
    *,
    max_batch: int,
    workers: int = 1,
    address: str | None = None,
    device: str = "auto",
) -> Iterator[Record]:
    """The records of all lines, as blocks of them are done; `load` runs in every worker.

    `address` names a cluster to join ("auto": the one that this machine is part of), None starts one here; a
    connection that is there already is used. A worker takes one logical CPU, and a GPU where the cluster has some and
    `device` is not the CPU. Raises `DominoTreeError` where a worker cannot load its model, or no cluster is found.
    """
    rows = [{"number": line.number, "text": line.text} for line in lines]
    if not rows:
        return
    ours = _connect(address, workers)
    try:
        workers = min(workers, len(rows))
        size = min(ROUNDS_OF_A_BLOCK * max_batch, -(-len(rows) // workers))
        gpus = 1 if device != "cpu" and ray.cluster_resources().get("GPU") else None
        data = ray.data.from_items(rows, override_num_blocks=-(-len(rows) // size)).map_batches(
            Worker,
            fn_constructor_args=(load, job),
            batch_size=None,
            compute=ray.data.ActorPoolStrategy(size=workers),
            num_cpus=1,
            num_gpus=gpus,
        )
        for row in data.iter_rows():
            if row["fault"]:
                raise DominoTreeError(row["fault"])
            yield json.loads(row["record"])
    finally:
        if ours:
            ray.shutdown()


def _connect(address: str | None, workers: int) -> bool:
    """Joins or starts a cluster; False where there was a connection before."""
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    if ray.is_initialized():
        return False
    # CPUs are counted, not reserved: Ray Data waits for ever where its workers leave none for itself.
    fresh = {"num_cpus": max(usable_cpus(), workers) + 2, "include_dashboard": False} if address is None else {}
    try:
        ray.init(address=address or "local", logging_level=logging.ERROR, log_to_driver=False, **fresh)
    except ConnectionError as error:
        raise DominoTreeError(f"no Ray cluster at {address!r} ({' '.join(str(error).split())[:120]})") from error
    return True
