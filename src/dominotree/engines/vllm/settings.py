"""What the user of vLLM may set: `--speculative-config` and the part of `--additional-config` that is ours."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from dominotree.drafters.dflash import Drafter
from dominotree.errors import InvalidRequest
from dominotree.hub import PAIRS
from dominotree.methods import Drafting

PROPOSER = "dominotree.vllm.Proposer"
"""The model name of the speculative config by which an engine is ours."""


@dataclass(frozen=True)
class Settings:
    """`--additional-config '{"dominotree": {...}}'`.

    `mode` tree verifies trees, which needs a model runner of ours; chain verifies one path through hooks that vLLM
    offers anyway. `method` is by default the drafter's own; the others are as in `Drafting`.
    """

    drafter: str
    mode: str = "tree"
    method: str | None = None
    candidates: int | None = None
    node_topk: int | None = None

    @classmethod
    def of(cls, config: Any) -> Settings:
        """The settings in a `VllmConfig`; raises `InvalidRequest` for what is not understood."""
        given = config.additional_config.get("dominotree", {}) if isinstance(config.additional_config, dict) else {}
        known = [field.name for field in fields(cls)]
        if not isinstance(given, dict) or (unknown := sorted(set(given) - set(known))):
            what = repr(unknown[0]) if isinstance(given, dict) else repr(given)
            raise InvalidRequest(
                f"{what} in additional_config's dominotree is unknown; {', '.join(known)} are expected"
            )
        if given.get("mode", "tree") not in ("tree", "chain"):
            raise InvalidRequest(f"mode is {given['mode']!r}; tree or chain is expected")
        drafter = given.get("drafter") or _usual_drafter(config.model_config.model)
        if not isinstance(drafter, str) or drafter == "none":
            raise InvalidRequest(f"drafter is {drafter!r}; a folder, a hub id or a name is expected")
        return cls(**{**given, "drafter": drafter})

    def drafting(self, drafter: Drafter, budget: int, *, chain: bool = False) -> Drafting:
        """How requests draft; with `chain` (or in chain mode) a chain even where trees are drafted otherwise."""
        options: dict[str, Any] = {
            name: value for name in ("candidates", "node_topk") if (value := getattr(self, name)) is not None
        }
        domino = drafter.head is not None
        usual = (
            ("domino" if domino else "dflash")
            if chain or self.mode == "chain"
            else "lookuptree"
            if domino
            else "ddtree"
        )
        drafting = Drafting(method=usual if chain else self.method or usual, budget=budget, **options)
        drafting.check(drafter)
        kind = drafting.kind
        if kind.rule != "fixed" or not kind.drafts or (self.mode == "chain" and kind.shape != "chain"):
            raise InvalidRequest(f"method {drafting.method} cannot be used here in mode {self.mode}; {usual} can")
        if not chain:  # chains beside trees are given what the trees are
            kind.refuse_idle(options)
        return drafting


def _usual_drafter(model: str) -> str:
    """The drafter of the named pair whose target `model` is, by hub id or by the name of its folder."""
    for name, pair in PAIRS.items():
        if model in (name, pair.target) or model.rstrip("/").split("/")[-1] == name:
            return f"{name}-domino" if pair.drafter else f"{name}-dflash"
    raise InvalidRequest(
        f'no drafter is known for {model}; name one: --additional-config \'{{"dominotree": {{"drafter": ...}}}}\''
    )
