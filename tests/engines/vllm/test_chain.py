"""Mode chain: our drafts through vLLM's public hooks and its own verification."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM; `make test-vllm` runs this in an environment of its own")

from engines.vllm.host import Oracle, accepted, answers, engine, generate, random_prompts

CHAIN = {"mode": "chain"}


def test_answers_are_those_of_plain_vllm(target: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = random_prompts(6)
    with engine(target) as plain:
        expected = answers(plain, prompts)
    oracle = Oracle()
    oracle.install(monkeypatch)
    oracle.scripts = [p + a for p, a in zip(prompts, expected, strict=True)]
    with engine(target, drafter, dominotree=CHAIN) as drafting:
        outputs = generate(drafting, prompts)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        kept = accepted(outputs)
        assert sum(kept) > len(kept) / 2, "the oracle was not heard"
        assert [answers(drafting, [prompt])[0] for prompt in prompts] == expected
