"""`dominotree batch --ray` on two nodes: the records of one machine, also where a node is lost on the way."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.data", reason="needs Ray; `make test-ray` runs this in an environment of its own")

from cli.conftest import Run
from dominotree.batch import Job, Line, records, room
from dominotree.engines.ray_batch import spread
from dominotree.errors import DominoTreeError, ModelNotFound
from dominotree.pair import load
from dominotree.sampling import SamplingParams
from engines.ray.host import load_slowly

JOB = Job(SamplingParams(temperature=0.8, max_new_tokens=12), seed=7)


def some_lines(count: int) -> list[Line]:
    texts: list[dict[str, Any]] = [{"prompt": f"prompt {i}", "temperature": (i % 3) / 2} for i in range(count)]
    texts[3] = {"id": "wrong", "prompt": [999999]}
    return [Line(number, json.dumps(text).encode()) for number, text in enumerate(texts, start=1)]


def here(lines: list[Line], model: Path, drafter: Path) -> list[dict[str, Any]]:
    """The records of this process alone, in order."""
    pair = load(target=str(model), drafter=str(drafter), dtype="float32")
    drafting = pair.drafting()
    found = records(pair, lines, JOB, drafting, room(pair, lines, JOB, drafting))
    return sorted(found, key=lambda record: record["line"])


def test_the_work_of_a_lost_node_is_done_again(cluster: Any, model: Path, drafter: Path, tmp_path: Path) -> None:
    lines, came = some_lines(60), []
    slow = partial(load_slowly, str(model), str(drafter), str(tmp_path), 0.05)
    for record in spread(slow, lines, JOB, max_batch=1, workers=2):
        came.append(record)
        if len(came) == 5:
            cluster.lose()
    assert sorted(came, key=lambda record: record["line"]) == here(lines, model, drafter)
    loaded = [path.name.partition("-")[0] for path in tmp_path.iterdir()]
    assert cluster.second_id in loaded and len(loaded) > 2  # it had a worker, which was replaced


def test_a_worker_that_cannot_load_ends_the_run_with_one_line(cluster: Any, tmp_path: Path) -> None:
    missing = partial(load_slowly, str(tmp_path / "none"), "none", str(tmp_path), 0)
    with pytest.raises(DominoTreeError, match="none") as caught:
        list(spread(missing, some_lines(4), JOB, max_batch=2))
    with pytest.raises(ModelNotFound) as alone:
        load(target=str(tmp_path / "none"))
    assert str(caught.value) == str(alone.value)


def test_the_command_writes_the_same_bytes_on_a_cluster_as_here(
    cluster: Any, run: Run, bare: Run, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\n".join(line.text for line in some_lines(12)))
    args = ("--temperature", 0.8, "--max-new-tokens", 10, "--max-batch", 2)
    for name, more in (("here", ()), ("spread", ("--ray", "--workers", 2))):
        result = run("batch", source, tmp_path / f"{name}.jsonl", *args, *more)
        assert result.exit_code == 3, result.stderr  # one line is wrong
    assert (tmp_path / "spread.jsonl").read_bytes() == (tmp_path / "here.jsonl").read_bytes()
    refused = bare("batch", source, tmp_path / "none.jsonl", "--target", tmp_path / "none", "--ray")
    assert refused.exit_code == 1 and refused.stderr.count("\n") == 1
