"""What users of vLLM may set; needs no vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dominotree.engines.vllm.settings import Settings
from dominotree.errors import InvalidRequest
from oracle import tiny_drafter
from targets.tiny import tiny_target


def config(model: str = "somewhere/smollm2-135m", **ours: Any) -> Any:
    return SimpleNamespace(additional_config={"dominotree": ours}, model_config=SimpleNamespace(model=model))


def test_the_drafter_of_a_named_pair_is_found_by_its_target() -> None:
    assert Settings.of(config()).drafter == "smollm2-135m-domino"
    assert Settings.of(config("Qwen/Qwen3-4B")).drafter == "qwen3-4b-domino"
    assert Settings.of(config("meta-llama/Llama-3.1-8B-Instruct")).drafter == "llama3.1-8b-dflash"
    assert Settings.of(config("elsewhere", drafter="mine", mode="chain")) == Settings("mine", mode="chain")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (config(budget=3), "'budget' .* unknown; drafter, mode, method"),
        (config(mode="forest"), "mode is 'forest'; tree or chain"),
        (config("elsewhere"), "no drafter is known for elsewhere; name one"),
        (config(drafter="none"), "drafter is 'none'; a folder"),
        (config(drafter=5), "drafter is 5; a folder"),
        (SimpleNamespace(additional_config={"dominotree": "tree"}), "'tree' .* unknown"),
    ],
)
def test_settings_that_are_not_understood(given: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        Settings.of(given)


def test_the_usual_method_is_what_the_drafter_is_for() -> None:
    target = tiny_target()
    domino, dflash = tiny_drafter(target), tiny_drafter(target, projector=None)
    tree, chain = Settings("x"), Settings("x", mode="chain")
    assert [tree.drafting(d, 8).method for d in (domino, dflash)] == ["lookuptree", "ddtree"]
    assert [chain.drafting(d, 8).method for d in (domino, dflash)] == ["domino", "dflash"]
    assert [tree.drafting(d, 8, chain=True).method for d in (domino, dflash)] == ["domino", "dflash"]
    assert Settings("x", method="static", candidates=5, node_topk=2).drafting(domino, 3).candidates == 5


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (Settings("x", method="tree"), "method 'tree' is unknown"),
        (Settings("x", method="ar"), "method ar cannot be used here in mode tree; lookuptree can"),
        (Settings("x", method="adaptive"), "method adaptive cannot be used here"),
        (Settings("x", method="lookup"), "method lookup cannot be used here in mode tree; lookuptree can"),
        (Settings("x", mode="chain", method="dominotree"), "cannot be used here in mode chain; domino can"),
        (Settings("x", candidates=-1), "candidates is -1"),
        (Settings("x", mode="chain", candidates=8), "candidates has no effect with method domino"),
        (Settings("x", method="ddtree", candidates=8), "candidates has no effect with method ddtree"),
    ],
)
def test_drafting_that_is_not_possible(settings: Settings, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        settings.drafting(tiny_drafter(tiny_target()), 8)
