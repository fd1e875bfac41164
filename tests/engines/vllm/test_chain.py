"""Mode chain: our drafts through vLLM's public hooks and its own verification."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM; `make test-vllm` runs this in an environment of its own")

from engines.vllm.host import Oracle, accepted, answers, engine, random_prompts

CHAIN = {"mode": "chain"}


def test_answers_are_those_of_plain_vllm(target: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = random_prompts(6)
    with engine(target) as plain:
        expected = answers(plain, prompts)
    oracle = Oracle()
    oracle.install(monkeypatch)
    oracle.scripts = [p + a for p, a in zip(prompts, expected, strict=True)]
    with engine(target, drafter, dominotree=CHAIN) as drafting:
        assert answers(drafting, prompts) == expected
        rounds, kept = accepted(drafting)
        assert kept > rounds / 2, "the oracle was not heard"
        assert [answers(drafting, [prompt])[0] for prompt in prompts] == expected
