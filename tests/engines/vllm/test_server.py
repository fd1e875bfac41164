"""vLLM's own OpenAI server and its processes, with the plugin found by its entry point alone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM; `make test-vllm` runs this in an environment of its own")

import dominotree as dt
from dominotree.hub import resolve_target

pytestmark = [pytest.mark.pair, pytest.mark.slow]

SPEC = {"method": "custom_class", "model": "dominotree.vllm.Proposer", "num_speculative_tokens": 8}
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
QUESTIONS = ["Why is the sky blue?", "Name three rivers.", "What is 7 times 8?", "Write a haiku about rain."]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server, which runs as long as the tests of this file."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    arguments = {
        "--model": str(resolve_target("smollm2-135m")),
        "--served-model-name": "smollm2",
        "--dtype": "float32",
        "--max-model-len": "512",
        "--max-num-seqs": "4",
        "--kv-cache-memory-bytes": str(2**28),
        "--host": "127.0.0.1",
        "--port": str(port),
        "--speculative-config": json.dumps(SPEC),
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [part for pair in arguments.items() for part in pair]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **ENVIRONMENT})
        try:
            _wait(f"http://127.0.0.1:{port}/health", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def _wait(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(1200):
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-3000:])


def _post(server: str, question: str, **options: Any) -> Any:
    body = {"model": "smollm2", "temperature": 0, "max_tokens": 24, **options}
    body["messages"] = [{"role": "user", "content": question}]
    request = urllib.request.Request(
        f"{server}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=600)


def ask(server: str, question: str, **options: Any) -> str:
    """The text of an answer."""
    with _post(server, question, **options) as reply:
        return str(json.load(reply)["choices"][0]["message"]["content"])


def test_answers_are_our_own_engines(server: str) -> None:
    pair = dt.load(dtype="float32", progress=False)
    expected = [pair.generate(question, method="ar", max_new_tokens=24).text for question in QUESTIONS]
    assert [ask(server, question) for question in QUESTIONS] == expected
    with ThreadPoolExecutor(len(QUESTIONS)) as clients:
        assert list(clients.map(lambda question: ask(server, question), QUESTIONS)) == expected


def test_streams_and_stop_texts_are_the_whole_answers(server: str) -> None:
    whole = ask(server, QUESTIONS[0])
    pieces = []
    with _post(server, QUESTIONS[0], stream=True) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                pieces += [choice["delta"].get("content") or "" for choice in json.loads(line[6:])["choices"]]
    assert "".join(pieces) == whole
    stop = whole[12:16]
    assert ask(server, QUESTIONS[0], stop=[stop]) == whole[: whole.index(stop)]


def test_a_seed_repeats_an_answer(server: str) -> None:
    options = {"temperature": 0.9, "seed": 11}
    assert ask(server, QUESTIONS[3], **options) == ask(server, QUESTIONS[3], **options)
    assert ask(server, QUESTIONS[3], **options) != ask(server, QUESTIONS[3], **{**options, "seed": 12})


def test_a_client_that_leaves_harms_nobody(server: str) -> None:
    expected = ask(server, QUESTIONS[1])
    for _ in range(3):
        reply = _post(server, QUESTIONS[0], stream=True, max_tokens=300)
        reply.readline()
        reply.close()
    assert ask(server, QUESTIONS[1]) == expected


def test_trees_are_accepted(server: str) -> None:
    with urllib.request.urlopen(f"{server}/metrics") as page:
        lines = page.read().decode().splitlines()
    counts = {
        name: sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:spec_decode_num_{name}_total"))
        for name in ("drafts", "accepted_tokens")
    }
    assert counts["accepted_tokens"] > 0.5 * counts["drafts"] > 10


def test_tensor_parallel_answers_are_our_own_engines() -> None:
    """Three ranks, since the target has nine heads."""
    options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "kv_cache_memory_bytes": 2**26}
    options |= {"tensor_parallel_size": 3, "speculative_config": SPEC, "per_request_spec_decode_metrics": "detailed"}
    pair = dt.load(dtype="float32", progress=False)
    prompts = [pair.prompt_ids(question) for question in QUESTIONS[:2]]
    done = run(
        f"""
        import json, vllm
        llm = vllm.LLM({str(resolve_target("smollm2-135m"))!r}, **{options!r})
        prompts = [{{"prompt_token_ids": ids}} for ids in {prompts!r}]
        outputs = llm.generate(prompts, vllm.SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
        answers = [output.outputs[0] for output in outputs]
        print("ANSWERS", json.dumps([[list(a.token_ids), a.spec_decode_metrics.per_step_accepted] for a in answers]))
        """
    )
    [line] = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS")]
    own = pair.generate(prompts, method="lookuptree", budget=8, max_new_tokens=24)
    for (tokens, kept), output in zip(json.loads(line.removeprefix("ANSWERS")), own, strict=True):
        assert tokens == output.token_ids
        assert [1 + n for n in kept] == output.stats.accepted[: len(kept)]


def test_a_list_of_plugins_without_ours_is_refused_by_name() -> None:
    options = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 2**28, "speculative_config": SPEC}
    script = f"import vllm; vllm.LLM({str(resolve_target('smollm2-135m'))!r}, max_model_len=256, **{options!r})"
    done = run(script, VLLM_PLUGINS="another")
    assert done.returncode != 0
    assert "let VLLM_PLUGINS name dominotree too" in done.stdout + done.stderr


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script as a main program, whose processes vLLM spawns."""
    guarded = "if __name__ == '__main__':\n" + indent(dedent(script), "    ")
    command = [sys.executable, "-c", guarded]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **ENVIRONMENT, **environment})
