"""Best-first building on the CPU: the whole heap in one call of a C kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dominotree import native
from dominotree.drafters.domino import DominoHead
from dominotree.tree.budget import Sizing
from dominotree.tree.order import broken
from dominotree.tree.tree import Trees

_NOT_FINITE = 2


@dataclass(frozen=True)
class PathDependence:
    """What scores along a path are made of.

    `base` `[B, K, V']` base logits of any float dtype, `logits` `[B, K, M]` fp32 those of the candidates (None: of all
    V'), `hidden` `[B, K, H]` the backbone's output, `root_ids` `[B]`, `scale` `[B]` fp32 the factor of every correction
    (None: 1).
    """

    base: Tensor
    logits: Tensor | None
    hidden: Tensor
    root_ids: Tensor
    scale: Tensor | None
    head: DominoHead


@dataclass(frozen=True)
class Trie:
    """The scores of a round's tries, on the CPU: log-probabilities `[B, K, M]` fp32 for all paths, or what makes them.

    `candidates` `[B, K, M]` int64 draft-vocabulary indices, None: 0 .. M-1. `d2t` `[V']` int64 are the offsets from
    draft indices to target ids, None where those are the same; indices from V' on are words, with their ids in
    `word_ids`, if that is given.
    """

    candidates: Tensor | None
    d2t: Tensor | None
    scores: Tensor | PathDependence
    word_ids: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """B, K, M."""
        if isinstance(self.scores, Tensor):
            return self.scores.shape
        return (self.scores.base if self.scores.logits is None else self.scores.logits).shape


def build_heap(
    trie: Trie, budget: Sequence[int], children: int, depth_limit: Sequence[int], sizing: Sizing | None = None
) -> Trees:
    """The `budget[b]` best nodes of each trie, at most `children` per node and `depth_limit[b]` levels.

    With `sizing` fewer, where more would not pay, and best by its chances. Raises `NumericalError` where the backbone's
    output is not finite.
    """
    batch, levels, width = trie.shape
    size = max(budget, default=0)
    token, parent, depth = torch.empty(3, batch, size, dtype=torch.int64)
    score, given = torch.empty(2, batch, size, dtype=torch.float32)
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
        given=given.data_ptr(),
    )
    held = _point(forest, candidates=trie.candidates, d2t=trie.d2t, word_ids=trie.word_ids)
    if isinstance(trie.scores, PathDependence):
        held += _fill_path(forest, trie.scores)
    else:
        held += _point(forest, log_prob=trie.scores)
    if sizing is not None:
        held += _point(forest, cost=_table([ms[: size + 1] for ms in sizing.costs], batch, size + 1))
        if sizing.rates is not None:
            held += _point(forest, rate=torch.tensor(list(sizing.rates), dtype=torch.float32))
        if sizing.calibration is not None:
            held += _point(forest, calibration=_table(sizing.calibration[:levels], levels, 2))
    failed = native.library().dt_grow(ctypes.byref(forest))
    del held
    if failed == _NOT_FINITE:
        raise broken()
    if failed:
        raise MemoryError("building the tree ran out of memory")
    return trimmed(Trees(token, parent, depth, score, count, levels, given if sizing is not None else None))


def trimmed(trees: Trees) -> Trees:
    """The same trees with no more rows than the largest has."""
    size = max(trees.count.tolist(), default=0)
    if size == trees.size:
        return trees
    return replace(
        trees,
        token=trees.token[:, :size],
        parent=trees.parent[:, :size],
        depth=trees.depth[:, :size],
        score=trees.score[:, :size],
        given=None if trees.given is None else trees.given[:, :size],
    )


def _fill_path(forest: native.Forest, path: PathDependence) -> list[Tensor]:
    """Points `forest` at what scores along a path need; returns the tensors that have to outlive the call."""
    head = path.head
    assert head.input_table is not None, "a head without the table has no trie"
    forest.state, forest.rank, forest.hidden_size = head.state_size, head.rank, head.hidden_size
    forest.vocab, forest.words, forest.prefix = path.base.shape[-1], head.words, head.prefix_len
    forest.columns, forest.ranks = head.kernel_state.shape[1], head.kernel_hidden.shape[1]
    forest.weight_bf16, forest.proj_bf16 = _is_bf16(head.kernel_state), _is_bf16(head.kernel_proj_out)
    base, hidden = _readable(path.base), _readable(path.hidden)
    forest.base_bf16, forest.hidden_bf16 = _is_bf16(base), _is_bf16(hidden)
    return _point(
        forest,
        base=base,
        logits=path.logits,
        hidden=hidden,
        root=head.root_inputs(path.root_ids),
        scale=None if path.scale is None else path.scale.float(),
        from_state=head.kernel_state,
        from_hidden=head.kernel_hidden,
        input_table=head.input_table,
        word_inputs=head.word_inputs,
        proj_out=head.kernel_proj_out,
    )


def _table(rows: Sequence[Sequence[float]], count: int, width: int) -> Tensor:
    """Numbers as fp32 `[count, width]`, which the kernel reads to the end."""
    table = torch.tensor([list(row) for row in rows], dtype=torch.float32)
    if table.shape != (count, width):
        raise ValueError(f"a sizing has a table of {list(table.shape)}; {[count, width]} is expected")
    return table


def _readable(tensor: Tensor) -> Tensor:
    return tensor if _is_bf16(tensor) else tensor.float()


def _is_bf16(tensor: Tensor) -> bool:
    return tensor.dtype == torch.bfloat16


def _point(forest: native.Forest, **fields: Tensor | None) -> list[Tensor]:
    """Points fields at the values of tensors, None at nothing; returns what has to be kept for the call."""
    kept = {name: tensor.contiguous() for name, tensor in fields.items() if tensor is not None}
    for name, tensor in kept.items():
        setattr(forest, name, tensor.data_ptr())
    return list(kept.values())
