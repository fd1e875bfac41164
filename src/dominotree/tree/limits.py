"""The limits of a build, brought into one form for every builder."""

from collections.abc import Sequence

from torch import Tensor

from dominotree.errors import InvalidRequest

Limit = int | Sequence[int] | Tensor
"""One number for all sequences, or one each: a sequence of B ints or an integer tensor `[B]`."""


def per_sequence(limit: Limit | None, batch: int, default: int, name: str) -> list[int]:
    """The limit of every sequence, `default` where it is None; raises `InvalidRequest` if malformed."""
    if limit is None:
        return [default] * batch
    if isinstance(limit, int):
        values = [limit] * batch
    else:
        values = [int(v) for v in (limit.tolist() if isinstance(limit, Tensor) else limit)]
    if len(values) != batch:
        raise InvalidRequest(f"{name} has {len(values)} entries for {batch} sequences; give one each")
    if any(v < 0 for v in values):
        raise InvalidRequest(f"{name} is {min(values)}; it must be 0 or more")
    return values


def children_per_node(node_topk: int | None, width: int) -> int:
    """Most children a node may have: `node_topk`, or all `width` candidates; `InvalidRequest` below 1."""
    if node_topk is None:
        return width
    if node_topk < 1:
        raise InvalidRequest(f"node_topk is {node_topk}; it must be 1 or more, or None for no cap")
    return min(node_topk, width)
