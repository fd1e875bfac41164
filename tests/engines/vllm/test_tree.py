"""Mode tree against plain vLLM, token for token, on tiny models whose drafter knows the answers more or less."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM; `make test-vllm` runs this in an environment of its own")

from engines.vllm.host import Oracle, accepted, answers, engine, metric, random_prompts

PROMPTS = random_prompts(8)


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    with pytest.MonkeyPatch.context() as patch:
        told = Oracle()
        told.install(patch)
        yield told


@pytest.fixture(scope="module")
def plain(target: Path) -> Iterator[Any]:
    with engine(target) as llm:
        yield llm


@pytest.fixture(scope="module")
def drafting(target: Path, drafter: Path, oracle: Oracle) -> Iterator[Any]:
    with engine(target, drafter) as llm:
        yield llm


class Compare:
    """Answers of both engines, once the oracle was told what plain vLLM says."""

    def __init__(self, plain: Any, oracle: Oracle) -> None:
        self.plain, self.oracle = plain, oracle

    def __call__(self, drafting: Any, prompts: Sequence[Sequence[int]] = PROMPTS, **sampling: Any) -> None:
        """Asserts that they are equal together and one by one, and that trees had a part in it."""
        expected = [answers(self.plain, [prompt], **sampling)[0] for prompt in prompts]
        self.oracle.scripts = [[*p, *a] for p, a in zip(prompts, expected, strict=True)]
        rounds, kept = accepted(drafting)
        assert answers(drafting, prompts, **sampling) == expected
        assert [answers(drafting, [prompt], **sampling)[0] for prompt in prompts] == expected
        rounds, kept = accepted(drafting)[0] - rounds, accepted(drafting)[1] - kept
        assert kept > rounds, "the oracle was not heard"


@pytest.fixture
def compare(plain: Any, oracle: Oracle) -> Compare:
    return Compare(plain, oracle)


def test_greedy_answers_are_those_of_plain_vllm(compare: Compare, drafting: Any) -> None:
    compare(drafting)
    compare(drafting, max_tokens=1 + 24)
