"""Many clients at once: nobody's answer depends on the others, and nobody's trouble becomes theirs."""

from __future__ import annotations

import gc
import json
import random
import socket
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest
import torch

from dominotree.decode import Decoder
from dominotree.errors import NumericalError
from dominotree.generation import Request
from dominotree.sampling import Sampler, SamplingParams
from dominotree.serve.app import Settings
from dominotree.serve.engine import Answer, Limits
from dominotree.targets.base import Forward
from serve.conftest import Brake, Served, serving, tiny_pair, until

HELLO = [{"role": "user", "content": "hello"}]
LONG = {"messages": HELLO, "max_tokens": 400, "ignore_eos": True}
SHORT = {"messages": HELLO, "max_tokens": 3, "seed": 1}
CHAT = "/v1/chat/completions"
METHODS = ["ar", "lookuptree", "dominotree", "domino", "marginal", "static", "dflash", "ddtree"]


def mixed_requests(count: int) -> list[dict[str, Any]]:
    rng = random.Random(5)
    made = []
    for i in range(count):
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": "".join(rng.choices("abcdefgh ", k=rng.randrange(1, 300)))}],
            "max_tokens": rng.randrange(1, 40),
            "temperature": rng.choice([0, 0.7, 1.3]),
            "seed": i,
            "method": rng.choice(METHODS),
            "ignore_eos": True,
        }
        if body["method"] in ("lookuptree", "dominotree", "ddtree", "marginal"):
            body["budget"] = rng.choice([1, 4, 16, 40])
        if rng.random() < 0.3:
            body |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3}
        if rng.random() < 0.3:
            body["stop"] = ["e", "xyz"]
        made.append(body)
    return made


def streamed_text(served: Served, body: dict[str, Any]) -> tuple[str, str]:
    text, reason = "", ""
    with httpx.stream("POST", served.url + CHAT, json={**body, "stream": True}, timeout=120) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line[6:])["choices"][0]
                text += choice["delta"].get("content") or ""
                reason = choice["finish_reason"] or reason
    return text, reason


def solo(served: Served, body: dict[str, Any]) -> tuple[str, str]:
    names = ("temperature", "seed", "ignore_eos", "repetition_penalty", "frequency_penalty", "stop")
    given = {name: body[name] for name in names if name in body}
    sampling = SamplingParams(max_new_tokens=body["max_tokens"], **{"temperature": 1.0, **given})
    output = served.engine.pair.generate(body["messages"], method="ar", sampling=sampling)
    return output.text, output.finish_reason


def test_twenty_mixed_requests_at_once_get_their_solo_answers() -> None:
    with serving(tiny_pair(), Limits(max_batch=5, max_queue=30, context=512)) as served:
        bodies = mixed_requests(20)
        expected = [solo(served, body) for body in bodies]
        with ThreadPoolExecutor(20) as pool:
            streamed = list(pool.map(lambda body: streamed_text(served, body), bodies))
            whole = list(pool.map(lambda body: served.post(CHAT, body).json()["choices"][0], bodies))
        assert streamed == expected
        assert [(choice["message"]["content"], choice["finish_reason"]) for choice in whole] == expected
        served.wait_until_idle()
        until(lambda: served.engine.decoder._cache.free == list(range(5)))
        assert not served.engine.decoder.busy


def test_the_queue_is_bounded_and_says_when_to_come_back() -> None:
    with serving(tiny_pair(), Limits(max_batch=1, max_queue=1, context=512)) as served, Brake(served) as brake:
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(served.post, CHAT, SHORT)
            until(lambda: served.engine.open == 1)
            second = pool.submit(served.post, CHAT, SHORT)
            until(lambda: served.engine.open == 2)
            for stream in (False, True):
                refused = served.post(CHAT, {**SHORT, "stream": stream})
                assert refused.status_code == 429
                assert int(refused.headers["retry-after"]) >= 1
                assert refused.json()["error"]["code"] == "queue_full"
            brake.release()
            assert first.result().status_code == second.result().status_code == 200
        assert served.post(CHAT, SHORT).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot_within_a_round_or_two(stream: bool) -> None:
    with serving(tiny_pair(), Limits(max_batch=1, context=512)) as served, Brake(served) as brake:
        for left in range(1, 4):
            brake.rounds = 0
            client = leave_open(served, {**LONG, "stream": stream})
            brake.let(4)
            until(lambda: brake.rounds == 5)  # the fifth is held
            client.close()
            until(lambda: bool(served.engine._inbox.cancels))  # the event loop has noticed
            brake.let()
            until(lambda: served.engine.open == 0)
            assert brake.rounds == 5
            until(lambda n=left: served.metric("answers_total", outcome="cancelled", method="lookuptree") == n)  # type: ignore[misc]
        brake.release()
        assert served.post(CHAT, SHORT).status_code == 200


def leave_open(served: Served, body: dict[str, Any]) -> socket.socket:
    """Sends a request over a connection that the caller may close whenever it likes."""
    content = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}"
    client = socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])))
    client.sendall(head.encode() + b"\r\n\r\n" + content)
    return client


def test_an_error_in_one_request_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = Sampler.choose

    def broken(self: Sampler, logits: torch.Tensor, path: Sequence[int]) -> int:
        if self.params.seed == 666 and len(path) == 4:
            raise RuntimeError("secret detail of the prompt")
        return choose(self, logits, path)

    monkeypatch.setattr(Sampler, "choose", broken)
    with serving(tiny_pair(), Limits(max_batch=6, context=512)) as served:
        bodies = mixed_requests(5)
        expected = [solo(served, body) for body in bodies]
        bad = {"messages": HELLO, "max_tokens": 30, "seed": 666, "ignore_eos": True}
        with ThreadPoolExecutor(8) as pool:
            failing = [pool.submit(served.post, CHAT, bad) for _ in range(2)]
            streaming = pool.submit(lambda: served.post(CHAT, {**bad, "stream": True}).text)
            good = list(pool.map(lambda body: streamed_text(served, body), bodies))
        assert good == expected
        for reply in (future.result() for future in failing):
            assert reply.status_code == 500
            assert "secret" not in reply.text
        events = streaming.result().strip().split("\n\n")
        assert json.loads(events[-2][6:])["error"]["type"] == "server_error"
        assert events[-1] == "data: [DONE]"
        assert served.engine.ready
        assert served.post(CHAT, SHORT).status_code == 200


def test_one_failed_pass_ends_those_in_it_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tiny_pair(), Limits(max_batch=2, context=512)) as served:
        forward, failures = served.engine.pair.target.forward, [RuntimeError("out of memory")]

        def flaky(cache: Any, segments: Any, **options: Any) -> Any:
            if failures and not options.get("last_only"):
                raise failures.pop()
            return forward(cache, segments, **options)

        monkeypatch.setattr(served.engine.pair.target, "forward", flaky)
        assert served.post(CHAT, SHORT).status_code == 500
        assert served.engine.ready
        assert streamed_text(served, {**SHORT, "temperature": 1}) == solo(served, {**SHORT, "temperature": 1})


def test_a_model_that_cannot_run_any_more_makes_the_server_unready(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tiny_pair(), Limits(max_batch=1, context=512)) as served, Brake(served) as brake:
        assert served.get("/health").json() == {"live": True, "ready": True}

        def dead(*_: Any, **__: Any) -> Any:
            raise RuntimeError("device lost")

        monkeypatch.setattr(served.engine.pair.target, "forward", dead)
        with ThreadPoolExecutor(3) as pool:
            waiting = [pool.submit(served.post, CHAT, {**SHORT, "stream": stream}) for stream in (False, True, False)]
            until(lambda: served.engine.open == 3)
            brake.release()
            replies = [future.result() for future in waiting]
        assert all(reply.status_code >= 500 or "error" in reply.text for reply in replies)
        until(lambda: not served.engine.ready)
        assert served.get("/health").status_code == 503
        assert served.get("/health").json()["ready"] is False
        assert served.get("/health/ready").status_code == 503
        refused = served.post(CHAT, SHORT)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "unavailable"
        until(lambda: served.metric("engine_up") == 0)
        assert served.engine.open == 0


def test_an_answer_that_takes_too_long_ends_with_an_error() -> None:
    limits = Limits(max_batch=1, context=512, timeout_s=0.05)
    with serving(tiny_pair(), limits) as served, Brake(served) as brake:
        with ThreadPoolExecutor(2) as pool:
            whole = pool.submit(served.post, CHAT, LONG)
            stream = pool.submit(served.post, CHAT, {**LONG, "stream": True})
            until(lambda: served.engine.open == 2)
            threading.Event().wait(0.1)
            brake.release()
            assert whole.result().status_code == 504
            assert '"code":"timeout"' in stream.result().text
        served.wait_until_idle()


def test_an_earlier_prompt_is_not_encoded_again() -> None:
    with serving(tiny_pair(), Limits(max_batch=2, context=1024)) as served:
        question = {"role": "user", "content": "a question of some length " * 10}
        body = {"messages": [question], "max_tokens": 20, "seed": 1, "ignore_eos": True}
        first = served.post(CHAT, body).json()
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        again = served.post(CHAT, body).json()
        assert again["choices"] == first["choices"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == first["usage"]["prompt_tokens"] - 1
        turn = [question, first["choices"][0]["message"], {"role": "user", "content": "and then?"}]
        follow_up = {**body, "messages": turn}
        next_turn = served.post(CHAT, follow_up).json()
        assert next_turn["usage"]["prompt_tokens_details"]["cached_tokens"] > 200
        assert next_turn["choices"][0]["message"]["content"] == solo(served, follow_up)[0]
        until(lambda: served.metric("prefix_cache_hits_total") == 2)
        assert served.metric("prefix_cache_queries_total") == 3


def test_a_slot_decoded_plainly_serves_a_drafting_request_next() -> None:
    with serving(tiny_pair(), Limits(max_batch=1, context=512)) as served:
        body = {"messages": HELLO, "max_tokens": 20, "seed": 1, "ignore_eos": True}
        plain = served.post(CHAT, {**body, "method": "ar"}).json()
        tree = served.post(CHAT, {**body, "method": "dominotree"}).json()
        assert tree["choices"] == plain["choices"]


def test_running_answers_may_finish_at_shutdown() -> None:
    with (
        serving(tiny_pair(), Limits(max_batch=1, context=512), Settings(grace_s=30)) as served,
        Brake(served) as brake,
        ThreadPoolExecutor(2) as pool,
    ):
        body = {**LONG, "max_tokens": 20, "temperature": 0}
        running = pool.submit(streamed_text, served, body)
        until(lambda: served.engine.open == 1)
        served.server.should_exit = True
        until(lambda: served.engine._inbox.closing)
        brake.release()
        assert running.result() == solo(served, {**body, "temperature": 0})


def test_answers_that_outlast_the_grace_end_with_an_error() -> None:
    with (
        serving(tiny_pair(), Limits(max_batch=1, context=512), Settings(grace_s=0)) as served,
        Brake(served) as brake,
        ThreadPoolExecutor(2) as pool,
    ):
        stream = pool.submit(served.post, CHAT, {**LONG, "stream": True})
        until(lambda: served.engine.open == 1)
        whole = pool.submit(served.post, CHAT, LONG)
        until(lambda: served.engine.open == 2)
        brake.let()
        served.server.should_exit = True
        until(lambda: served.engine._inbox.closing)
        brake.release()
        assert whole.result().status_code == 503
        text = stream.result().text
        assert '"code":"unavailable"' in text and text.endswith("data: [DONE]\n\n")


def test_more_answers_than_can_ever_wait_are_refused() -> None:
    with serving(tiny_pair(), Limits(max_batch=1, max_queue=1, context=512)) as served:
        assert served.post(CHAT, {**SHORT, "n": 3}).json()["error"]["param"] == "n"
        assert len(served.post(CHAT, {**SHORT, "n": 2}).json()["choices"]) == 2


def test_nothing_of_a_finished_request_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Answer]] = []
    begin = Answer.__init__

    def noted(self: Answer, *args: Any) -> None:
        begin(self, *args)
        made.append(weakref.ref(self))

    monkeypatch.setattr(Answer, "__init__", noted)
    with serving(tiny_pair(), Limits(max_batch=2, context=512)) as served:
        for body in (SHORT, {**SHORT, "stream": True}, {**SHORT, "top_p": 9}, {**SHORT, "n": 2, "logprobs": True}):
            served.post(CHAT, body)
        leave_open(served, LONG).close()
        until(lambda: served.metric("answers_total", outcome="cancelled", method="lookuptree") == 1)
        served.post(CHAT, SHORT)
        assert len(made) == 6
        until(lambda: gc.collect() >= 0 and not any(answer() for answer in made), tries=100)


def test_logits_that_are_no_numbers_end_only_the_request_they_belong_to(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = tiny_pair()
    decoder = Decoder(pair.target, pair.drafter, slots=2, context=256)
    requests = [Request([5 + i, 9], SamplingParams(max_new_tokens=12, ignore_eos=True)) for i in range(2)]
    expected = Decoder(pair.target, pair.drafter, slots=2, context=256).run(requests)[1].tokens
    spoilt, sound = (decoder.add(request) for request in requests)
    decoder.step()
    whole = pair.target.forward

    def broken(*args: Any, **options: Any) -> Forward:
        out = whole(*args, **options)
        return replace(out, best=[-1, *out.best[1:]])

    with monkeypatch.context() as patch:
        patch.setattr(pair.target, "forward", broken)
        with pytest.raises(NumericalError):
            decoder.step()
    assert spoilt.finish_reason == "abort" and not sound.finished
    while decoder.busy:
        decoder.step()
    assert sound.tokens == expected
