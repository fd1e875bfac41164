"""A fleet of two replicas on two nodes behind one endpoint: the answers of one machine, also while a node is lost."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

pytest.importorskip("ray.serve", reason="needs Ray; `make test-ray` runs this in an environment of its own")

from ray import serve

from dominotree.errors import InvalidRequest
from dominotree.pair import Pair, load
from dominotree.ray import Options, application
from engines.ray.host import SlowReplica

with socket.create_server(("127.0.0.1", 0)) as _free:
    PORT = _free.getsockname()[1]
URL = f"http://127.0.0.1:{PORT}"


@pytest.fixture
def fleet(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Deploys an application of slow replicas on the cluster, and waits until it serves."""
    monkeypatch.setattr("dominotree.engines.ray.Replica", SlowReplica)
    serve.start(http_options={"port": PORT})

    def deploy(args: dict[str, Any]) -> None:
        try:
            serve.run(application(args), name="fleet")
        except RuntimeError as error:
            details = serve.status().applications["fleet"].deployments["dominotree"]
            pytest.fail(f"{error} {details}")

    yield deploy
    serve.shutdown()


def options(model: Path, drafter: Path, **more: Any) -> dict[str, Any]:
    return {"target": str(model), "drafter": str(drafter), "dtype": "float32", "context": 512, "max_batch": 2, **more}


def client(retries: int = 0) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{URL}/v1", api_key="any", max_retries=retries, timeout=120)


def said(number: int) -> dict[str, Any]:
    """What request `number` asks for: half of them sampled, every third streamed."""
    return {
        "messages": [{"role": "user", "content": f"request {number}"}],
        "max_tokens": 24,
        "temperature": (number % 2) * 0.9,
        "seed": number,
        "stream": number % 3 == 0,
    }


def answer(api: openai.OpenAI, request: dict[str, Any]) -> str:
    reply = api.chat.completions.create(model=None, **request)  # type: ignore[call-overload]
    if not request["stream"]:
        return reply.choices[0].message.content or ""
    pieces, ended = [], False
    for chunk in reply:
        pieces.append(chunk.choices[0].delta.content or "")
        ended = ended or chunk.choices[0].finish_reason is not None
    assert ended, "the stream was cut off"
    return "".join(pieces)


def alone(pair: Pair, request: dict[str, Any]) -> str:
    """What one machine answers, decoding plainly."""
    return pair.generate(
        request["messages"],
        method="ar",
        max_new_tokens=request["max_tokens"],
        temperature=request["temperature"],
        seed=request["seed"],
    ).text


def patiently(request: dict[str, Any]) -> tuple[str, int]:
    """The answer, and how often it had to be asked for again."""
    for again in range(60):
        try:
            return answer(client(), request), again
        except (openai.APIError, httpx.HTTPError, AssertionError):
            time.sleep(1)
    pytest.fail("no answer after many tries")


def test_no_request_is_lost_with_a_node_and_answers_are_those_of_one_machine(
    cluster: Any, fleet: Callable[..., None], model: Path, drafter: Path
) -> None:
    fleet(options(model, drafter, replicas=2, cpus=3))  # one fits on a node, and no second one beside it
    requests, begun = [said(number) for number in range(40)], threading.Semaphore(0)

    def ask(request: dict[str, Any]) -> tuple[str, int]:
        begun.release()
        return patiently(request)

    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(ask, request) for request in requests]
        for _ in range(12):
            begun.acquire()
        cluster.lose()
        found = [answer.result()[0] for answer in answers]
        assert any(answer.result()[1] for answer in answers), "the lost node had nothing to do"
    pair = load(target=str(model), drafter=str(drafter), dtype="float32")
    assert found == [alone(pair, request) for request in requests]


def test_a_replica_that_is_ended_finishes_what_it_has_begun(
    fleet: Callable[..., None], model: Path, drafter: Path
) -> None:
    given = options(model, drafter)
    fleet(given)
    assert httpx.get(f"{URL}/health").json() == {"live": True, "ready": True}
    request = {**said(3), "max_tokens": 200, "extra_body": {"ignore_eos": True}}
    stream = client().chat.completions.create(model=None, **request)  # type: ignore[call-overload]
    last = next(iter(stream))
    replacing = threading.Thread(target=fleet, args=({**given, "max_batch": 3},))
    replacing.start()
    while serve.status().applications["fleet"].status == "RUNNING":
        last = next(iter(stream))
    assert last.choices[0].finish_reason is None, "the answer was over before the replica was ended"
    *_, last = stream
    assert last.choices[0].finish_reason == "length"
    replacing.join()
    assert answer(client(), said(1))


def test_replicas_are_added_under_load_and_answer_alike(
    cluster: Any, fleet: Callable[..., None], model: Path, drafter: Path
) -> None:
    """Ray looks at what is asked of the replicas and adds one after half a minute."""
    fleet(options(model, drafter, replicas=1, max_replicas=2, max_batch=1, cpus=3))

    def running() -> int:
        deployment = serve.status().applications["fleet"].deployments["dominotree"]
        return deployment.replica_states.get("RUNNING", 0)

    assert running() == 1
    grown, deadline, found = threading.Event(), time.monotonic() + 150, dict[int, str]()

    def ask(first: int) -> None:
        for number in range(first, 10_000, 4):
            found[number], _ = patiently(said(number))
            if grown.is_set():
                return

    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, first) for first in range(4)]
        while running() < 2 and time.monotonic() < deadline:
            time.sleep(1)
        seen = running()
        time.sleep(3)  # both answer for a while
        grown.set()
    for one in asked:
        one.result()
    assert seen == 2
    pair = load(target=str(model), drafter=str(drafter), dtype="float32")
    few = sorted(found)[:8] + sorted(found)[-8:]
    assert [found[number] for number in few] == [alone(pair, said(number)) for number in few]


def test_options_that_are_wrong_are_refused_before_anything_starts(model: Path) -> None:
    for wrong, named in (
        ({"replica": 2}, "replica"),
        ({"replicas": "many"}, "replicas"),
        ({"replicas": 3, "max_replicas": 2}, "max_replicas is 2"),
        ({"max_batch": 0}, "max_batch is 0"),
        ({"method": "ar", "budget": 8}, "budget has no effect with method ar"),
        ({"method": "magic"}, "magic"),
    ):
        with pytest.raises(InvalidRequest, match=named):
            application({"target": str(model), **wrong})


def test_texts_are_read_as_ray_passes_them_on(model: Path) -> None:
    deployment = application({"target": str(model), "replicas": "1", "max_replicas": "4", "budget": "8"})
    config = deployment._bound_deployment._deployment_config
    assert (config.autoscaling_config.min_replicas, config.autoscaling_config.max_replicas) == (1, 4)
    assert config.autoscaling_config.target_ongoing_requests == 8
    assert Options.model_validate({"allowed_hosts": "a.example,b.example"}).settings.hosts == ("a.example", "b.example")
