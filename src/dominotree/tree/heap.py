"""Best-first building on the CPU: the whole heap in one call of a C kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dominotree import native
from dominotree.drafters.domino import DominoHead
from dominotree.tree.order import broken
from dominotree.tree.tree import Trees

_NOT_FINITE = 2


@dataclass(frozen=True)
class PathDependence:
    """What corrections along a path are made of.

    `logits` `[B, K, M]` fp32 base logits of the candidates, `hidden` `[B, K, H]` the backbone's output, `root_ids`
    `[B]`, `scale` `[B]` fp32 the factor of every correction (None: 1).
    """

    logits: Tensor
    hidden: Tensor
    root_ids: Tensor
    scale: Tensor | None
    head: DominoHead


@dataclass(frozen=True)
class Trie:
    """The scores of a round's tries, on the CPU.

    `candidates` `[B, K, M]` int64 draft-vocabulary indices, None: 0 .. M-1. `log_prob` fp32: `[B, K, M]` where scores
    do not depend on the path, else `[B, prefix, M]` for the depths that are left uncorrected. `d2t` `[V']` int64 are
    the offsets from draft indices to target ids, None where those are the same.
    """

    candidates: Tensor | None
    log_prob: Tensor
    d2t: Tensor | None
    path: PathDependence | None = None


def build_heap(trie: Trie, budget: Sequence[int], children: int, depth_limit: Sequence[int]) -> Trees:
    """The `budget[b]` best nodes of each trie, at most `children` per node and `depth_limit[b]` levels.

    Raises `NumericalError` where the backbone's output is not finite.
    """
    batch, levels, width = (trie.log_prob if trie.path is None else trie.path.logits).shape
    size = max(budget, default=0)
    token, parent, depth = torch.empty(3, batch, size, dtype=torch.int64).unbind()
    score = torch.empty(batch, size)
    limits = torch.tensor([budget, depth_limit, budget], dtype=torch.int64)
    count = limits[2]
    forest = native.Forest(
        sequences=batch,
        levels=levels,
        width=width,
        size=size,
        children=children,
        threads=torch.get_num_threads(),
        budget=limits.data_ptr(),
        depth_limit=limits.data_ptr() + 8 * batch,
        token=token.data_ptr(),
        parent=parent.data_ptr(),
        depth=depth.data_ptr(),
        count=count.data_ptr(),
        score=score.data_ptr(),
    )
    held = [_point(forest, "log_prob", trie.log_prob), _point(forest, "candidates", trie.candidates)]
    held += [_point(forest, "d2t", trie.d2t)]
    if trie.path is not None:
        held += _fill_path(forest, trie.path, trie.log_prob.shape[1])
    failed = native.library().dt_grow(ctypes.byref(forest))
    del held
    if failed == _NOT_FINITE:
        raise broken()
    if failed:
        raise MemoryError("building the tree ran out of memory")
    return trimmed(Trees(token, parent, depth, score, count, levels))


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


def _fill_path(forest: native.Forest, path: PathDependence, prefix: int) -> list[Tensor | None]:
    """Points `forest` at what corrections need; returns the tensors that have to outlive the call."""
    head = path.head
    assert head.input_table is not None, "a head without the table has no trie"
    forest.state, forest.rank, forest.hidden_size = head.state_size, head.rank, head.hidden_size
    forest.prefix, forest.columns, forest.ranks = prefix, head.kernel_state.shape[1], head.kernel_hidden.shape[1]
    forest.weight_bf16 = head.kernel_state.dtype == torch.bfloat16
    forest.proj_bf16 = head.kernel_proj_out.dtype == torch.bfloat16
    forest.from_state, forest.from_hidden = head.kernel_state.data_ptr(), head.kernel_hidden.data_ptr()
    forest.input_table, forest.proj_out = head.input_table.data_ptr(), head.kernel_proj_out.data_ptr()
    hidden = path.hidden if path.hidden.dtype == torch.bfloat16 else path.hidden.float()
    forest.hidden_bf16 = hidden.dtype == torch.bfloat16
    root = head.root_inputs(path.root_ids)
    given = {"logits": path.logits, "hidden": hidden, "root": root, "scale": path.scale}
    return [_point(forest, name, tensor) for name, tensor in given.items()]


def _point(forest: native.Forest, name: str, tensor: Tensor | None) -> Tensor | None:
    """Points a field at a tensor's values, or at nothing; returns what has to be kept."""
    if tensor is not None:
        tensor = tensor.contiguous()
        setattr(forest, name, tensor.data_ptr())
    return tensor
