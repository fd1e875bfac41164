"""Acceptance with vLLM's own sampler: it chooses at every node that a walk visits, as it would without drafting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dominotree.tree.tree import Tree


@dataclass
class Walk:
    """One sequence's way down its tree."""

    start: int
    """The root's row among those of the step; node i has row `start + 1 + i`."""
    first: int
    """The root's row in the step's logits, likewise."""
    tree: Tree
    most: int
    """Tokens that may be chosen; 0 where the prompt is still being encoded."""
    tokens: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)

    @property
    def row(self) -> int:
        """The row to choose from next."""
        return self.first + 1 + self.nodes[-1] if self.nodes else self.first

    def step(self, token: int) -> bool:
        """Takes the token chosen at the current row; whether the walk goes on."""
        self.tokens.append(token)
        child = self.tree.child_with_token(self.nodes[-1] if self.nodes else -1, token)
        if child is None or len(self.tokens) >= self.most:
            return False
        self.nodes.append(child)
        return True


def walk_trees(sampler: Any, logits: torch.Tensor, metadata: Any, walks: Sequence[Walk]) -> Any:
    """Walks all trees of a step level by level; returns vLLM's `SamplerOutput`, rejected places filled with -1.

    `logits` `[rows, vocab]`. Each level samples all sequences, so that what vLLM holds by row in the batch stays in
    place, and counts those still walking: only their generators draw, once for every token as in plain decoding.
    """
    from vllm.v1.outputs import LogprobsTensors, SamplerOutput

    going = [i for i, walk in enumerate(walks) if walk.most > 0]
    chosen: list[torch.Tensor] = []
    logprobs: list[Any] = []
    while going or not chosen:
        rows = logits[[walk.row for walk in walks]]
        history = [[*past, *walk.tokens] for past, walk in zip(metadata.output_token_ids, walks, strict=False)]
        generators = {i: metadata.generators[i] for i in going if i in metadata.generators}
        level = replace(metadata, generators=generators, output_token_ids=history, spec_token_ids=None)
        output = sampler(logits=rows, sampling_metadata=level)
        column = torch.full((len(walks), 1), -1, dtype=torch.int32)
        column[going] = output.sampled_token_ids[going]
        chosen.append(column)
        logprobs.append(output.logprobs_tensors)
        going = [i for i in going if walks[i].step(int(column[i]))]
    tensors = None
    if logprobs[0] is not None:  # sequence by sequence, each with a row for every level
        fields = zip(*((p.logprob_token_ids, p.logprobs, p.selected_token_ranks) for p in logprobs), strict=True)
        tensors = LogprobsTensors(*(torch.stack(parts, dim=1).flatten(0, 1) for parts in fields))
    return SamplerOutput(sampled_token_ids=torch.cat(chosen, dim=1), logprobs_tensors=tensors)
