"""Each published method as a composition: whose draft, how nodes are scored, chain or tree, what bounds it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from dominotree.drafters.coupling import Noise, couple, sample_candidates
from dominotree.drafters.dflash import Draft, Drafter
from dominotree.drafters.words import Vocabulary
from dominotree.errors import InvalidRequest
from dominotree.tree.batched import build
from dominotree.tree.budget import Sizing
from dominotree.tree.chain import base_chain, corrected_chain
from dominotree.tree.reference import build_reference
from dominotree.tree.scorers import ConditionalScorer, MarginalScorer, Scorer, StaticScorer
from dominotree.tree.tree import Trees

Score = Literal["none", "base", "static", "conditional"]


@dataclass(frozen=True)
class Method:
    """What a method is made of. `drafter` names the checkpoint it was published with."""

    name: str
    drafter: Literal["none", "dflash", "domino"]
    score: Score
    shape: Literal["none", "chain", "tree"]
    summary: str
    rule: Literal["fixed", "cost", "calibrated"] = "fixed"
    """What sets a tree's size: the budget; the cost-aware rule up to the budget; the same on calibrated chances."""
    lookup: bool = False
    """Whether what the text so far would go on with is joined to the tree (prompt lookup)."""

    @property
    def drafts(self) -> bool:
        """Whether a drafter is at work."""
        return self.score != "none"

    @property
    def idle(self) -> set[str]:
        """The options of `Drafting` that have no effect."""
        idle = set() if self.drafts else {"candidates", "node_topk", "noise_aware"}
        if self.shape != "tree":
            return idle | {"budget", "candidates", "node_topk"}
        return idle | {"candidates"} if self.drafter == "dflash" else idle

    def refuse_idle(self, given: Iterable[str], named: Callable[[str], str] = str) -> None:
        """Raises `InvalidRequest` where one of the options that were `given` has no effect with this method.

        The message calls it `named(option)`.
        """
        for option in given:
            if option in self.idle:
                raise InvalidRequest(
                    f"{named(option)} has no effect with method {self.name}; leave it out or use another method"
                )

    @property
    def needs_head(self) -> bool:
        """Whether the drafter must have a Domino correction head."""
        return self.score in ("static", "conditional")


METHODS = {
    method.name: method
    for method in (
        Method("ar", "none", "none", "none", "plain decoding: one token a pass"),
        Method("lookup", "none", "none", "tree", "prompt lookup: what the text itself says, no drafter", lookup=True),
        Method("dflash", "dflash", "base", "chain", "DFlash: the most likely token at every depth (2602.06036)"),
        Method("ddtree", "dflash", "base", "tree", "DDTree: best-first tree over DFlash's marginals (2604.12989)"),
        Method("domino", "domino", "conditional", "chain", "Domino: a chain corrected along its own path (2605.29707)"),
        Method("marginal", "domino", "base", "tree", "ablation: tree over a Domino drafter's uncorrected marginals"),
        Method("static", "domino", "static", "tree", "ablation: tree corrected once, along the greedy path"),
        Method("caddtree", "dflash", "base", "tree", "CaDDTree: DDTree with a cost-aware budget (2606.01813)", "cost"),
        Method("condadaptive", "domino", "conditional", "tree", "DominoTree with CaDDTree's budget rule", "cost"),
        Method(
            "adaptive",
            "domino",
            "conditional",
            "tree",
            "lookuptree, its budget set by learned chances and cost",
            "calibrated",
            lookup=True,
        ),
        Method(
            "dominotree",
            "domino",
            "conditional",
            "tree",
            "DominoTree: every node corrected along its own path (2607.08642)",
        ),
        Method(
            "lookuptree",
            "domino",
            "conditional",
            "tree",
            "DominoTree joined by what followed in the text when it last read so (prompt lookup)",
            lookup=True,
        ),
    )
}

DEFAULT_BUDGET = 16
DEFAULT_CANDIDATES = 64
DEFAULT_CAP = 64
MAX_BUDGET = 1024


@dataclass(frozen=True)
class Drafting:
    """How a request drafts: the method, the most nodes its tree may have, candidates per depth (0: all), children cap.

    Without a budget it is 16, and 64 for methods that set the size themselves.
    """

    method: str = "dominotree"
    budget: int | None = None
    candidates: int = DEFAULT_CANDIDATES
    node_topk: int | None = None
    noise_aware: bool = False
    """Rank candidates with the noise of the target's own draws (temperature above 0); never changes the output."""
    sampled_candidates: bool = False
    """Ablation: candidates are drawn from the draft distribution, in place of its likeliest tokens."""
    reference_builder: bool = False
    """Ablation: trees come from the plain heap."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InvalidRequest(f"method {self.method!r} is unknown; one of {', '.join(METHODS)} is expected")
        if self.budget is None:
            object.__setattr__(self, "budget", DEFAULT_BUDGET if self.kind.rule == "fixed" else DEFAULT_CAP)
        for name, low, high in (("budget", 0, MAX_BUDGET), ("candidates", 0, 2**31)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise InvalidRequest(f"{name} is {value!r}; an integer from {low} to {high} is expected")
        for name in ("noise_aware", "sampled_candidates", "reference_builder"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} is {getattr(self, name)!r}; True or False is expected")
        if self.node_topk is not None and (not isinstance(self.node_topk, int) or self.node_topk < 1):
            raise InvalidRequest(f"node_topk is {self.node_topk!r}; a positive integer or None is expected")

    @property
    def kind(self) -> Method:
        """The method's composition."""
        return METHODS[self.method]

    @property
    def most_nodes(self) -> int:
        """The budget, or the default that stands for None."""
        assert self.budget is not None, "set when made"
        return self.budget

    def nodes(self, draft_length: int) -> int:
        """The most nodes a round of this drafting verifies, given K."""
        return {"none": 0, "chain": draft_length, "tree": self.most_nodes}[self.kind.shape]

    def check(self, drafter: Drafter | None) -> None:
        """Raises `InvalidRequest` when the drafter at hand cannot serve the method."""
        if not self.kind.drafts:
            return
        if drafter is None:
            raise InvalidRequest(
                f"method {self.method} needs a drafter; give one (--drafter) or use method lookup or ar"
            )
        if self.kind.needs_head and drafter.head is None:
            raise InvalidRequest(
                f"method {self.method} needs a Domino drafter and this one is plain DFlash; use dflash or ddtree"
            )


def grow(
    drafting: Drafting,
    drafter: Drafter,
    draft: Draft,
    max_depth: Sequence[int],
    noise: Sequence[Noise | None] = (),
    most_nodes: Sequence[int] | None = None,
    sizing: Sizing | None = None,
) -> Trees:
    """The trees (or chains) to verify for a draft over a batch; `max_depth[i]` bounds the depths of sequence i.

    `noise[i]` are the draws that sequence i is known to make, where drafting should look at them. `most_nodes[i]`
    bounds its tree, None: the budget does; a `sizing` may end it earlier, which `Trees.given` tells.
    """
    scale, vocabulary = None, drafter.vocabulary(draft)
    if any(noise):
        base, scale = couple(draft.base, noise, vocabulary.tokens(draft.base))
        draft = replace(draft, base=base)
    kind = drafting.kind
    assert kind.drafts, f"method {drafting.method} has no draft to grow a tree from"
    if drafting.sampled_candidates:
        draft = replace(draft, base=sample_candidates(draft.base, drafting.candidates))
    if kind.shape == "tree":
        scorer = score(drafting, vocabulary, draft, scale)
        budgets, children = most_nodes or drafting.most_nodes, drafting.node_topk
        if drafting.reference_builder:
            return build_reference(scorer, budgets, node_topk=children, max_depth=max_depth)
        return build(scorer, budgets, node_topk=children, max_depth=max_depth, sizing=sizing)
    if kind.score == "base":
        return base_chain(draft.base, d2t=vocabulary.d2t, words=vocabulary.words, max_depth=max_depth)
    assert vocabulary.head is not None
    return corrected_chain(draft.base, draft.hidden, draft.roots, vocabulary.head, max_depth=max_depth, scale=scale)


def score(drafting: Drafting, vocabulary: Vocabulary, draft: Draft, scale: torch.Tensor | None = None) -> Scorer:
    """The scorer of a tree method for a draft; `scale` `[batch]` multiplies corrections."""
    kind, base = drafting.kind, draft.base
    vocab = base.shape[-1]
    width = min(drafting.candidates or vocab, vocab)
    if kind.score == "base":
        if kind.drafter == "dflash":
            width = max(1, min(drafting.most_nodes, vocab))
        return MarginalScorer(base, width, vocabulary.d2t, vocabulary.words)
    assert vocabulary.head is not None
    made = StaticScorer if kind.score == "static" else ConditionalScorer
    return made(base, draft.hidden, draft.roots, vocabulary.head, width, scale)
