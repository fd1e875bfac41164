"""Best-first building on the CPU: the whole heap in one call of a C kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dominotree import native
from dominotree.drafters.domino import DominoHead
from dominotree.tree.tree import Trees


@dataclass(frozen=True)
class PathDependence:
    """What corrections along a path are made of.

    `logits` `[B, K, M]` base logits of the candidates, `hidden_part` `[B, K, E]`, `root` `[B, 3G]` the GRU's input
    products of the roots, `scale` `[B]` the factor of every correction; all fp32.
    """

    logits: Tensor
    hidden_part: Tensor
    root: Tensor
    scale: Tensor
    head: DominoHead


@dataclass(frozen=True)
class Trie:
    """The scores of a round's tries, on the CPU.

    `candidates` `[B, K, M]` int64 draft-vocabulary indices. `log_prob` fp32: `[B, K, M]` where scores do not depend on
    the path, else `[B, prefix, M]` for the depths that are left uncorrected.
    """

    candidates: Tensor
    log_prob: Tensor
    path: PathDependence | None = None


def build_heap(trie: Trie, tokens: Tensor, budget: Sequence[int], children: int, depth_limit: Sequence[int]) -> Trees:
    """The `budget[b]` best nodes of each trie, at most `children` per node and `depth_limit[b]` levels.

    `tokens` `[B, K, M]` are the candidates' target ids.
    """
    batch, levels, width = trie.candidates.shape
    size = max(budget, default=0)
    place, parent, depth = torch.zeros(3, batch, size, dtype=torch.int64)
    count = torch.zeros(batch, dtype=torch.int64)
    score = torch.full((batch, size), -torch.inf)
    limits = torch.tensor([list(budget), list(depth_limit)], dtype=torch.int64)
    candidates, log_prob = trie.candidates.contiguous(), trie.log_prob.contiguous()
    forest = native.Forest(
        sequences=batch,
        levels=levels,
        width=width,
        size=size,
        children=children,
        log_prob=log_prob.data_ptr(),
        candidates=candidates.data_ptr(),
        budget=limits[0].data_ptr(),
        depth_limit=limits[1].data_ptr(),
        place=place.data_ptr(),
        parent=parent.data_ptr(),
        depth=depth.data_ptr(),
        count=count.data_ptr(),
        score=score.data_ptr(),
    )
    held: list[Tensor] = []
    if trie.path is not None:
        held = _fill_path(forest, trie.path, log_prob.shape[1])
    if native.library().dt_grow(ctypes.byref(forest), torch.get_num_threads()):
        raise MemoryError("building the tree ran out of memory")
    del held
    rows = torch.arange(size) < count[:, None]
    token = tokens.flatten(1).gather(1, depth * width + place)
    trees = Trees(token.where(rows, 0), parent.where(rows, -1), depth, score, count, levels)
    return trimmed(trees)


def trimmed(trees: Trees) -> Trees:
    """The same trees with no more rows than the largest has."""
    size = int(trees.count.max()) if trees.batch else 0
    if size == trees.size:
        return trees
    return replace(
        trees,
        token=trees.token[:, :size],
        parent=trees.parent[:, :size],
        depth=trees.depth[:, :size],
        score=trees.score[:, :size],
    )


def _fill_path(forest: native.Forest, path: PathDependence, prefix: int) -> list[Tensor]:
    """Points `forest` at what corrections need; returns the tensors that have to outlive the call."""
    head = path.head
    assert head.input_table is not None, "a head without the table has no trie"
    weight, proj_out = head.kernel_weight, head.kernel_proj_out
    held = [x.contiguous() for x in (path.logits, path.hidden_part, path.root, path.scale)]
    forest.state, forest.rank, forest.vocab = head.state_size, head.rank, head.vocab_size
    forest.prefix, forest.columns = prefix, weight.shape[1]
    forest.weight_bf16 = int(weight.dtype == torch.bfloat16)
    forest.proj_bf16 = int(proj_out.dtype == torch.bfloat16)
    forest.logits, forest.hidden_part, forest.root, forest.scale = (x.data_ptr() for x in held)
    forest.from_state, forest.input_table = weight.data_ptr(), head.input_table.data_ptr()
    forest.proj_out = proj_out.data_ptr()
    return held
