"""The fast builder: the same trees as the reference heap, without a pass of PyTorch for every node."""

import torch
from torch import Tensor

from dominotree import native
from dominotree.errors import InvalidRequest
from dominotree.tree.budget import Sizing
from dominotree.tree.heap import build_heap, trimmed
from dominotree.tree.layers import build_layers
from dominotree.tree.limits import Limit, children_per_node, per_sequence
from dominotree.tree.scorers import Scorer
from dominotree.tree.tree import Trees


def build(
    scorer: Scorer,
    budgets: Limit,
    *,
    node_topk: int | None = None,
    max_depth: Limit | None = None,
    size: int | None = None,
    early_stop: bool | None = None,
    sizing: Sizing | None = None,
) -> Trees:
    """The best `budgets` nodes of each sequence's trie, as `build_reference` defines them (DominoTree).

    With `early_stop` (the default on a CPU, and only there) a C kernel takes the nodes off a heap one by one, where
    there is a compiler and the scorer can be handed to it, and the result has as many rows as its largest tree.
    Given a `sizing` that kernel also ends a tree where one more node would not pay; a result with `given` was sized so.
    Without `early_stop` every depth is a layer of fixed shape, the result has `size` rows (default: the largest
    budget), and nothing waits for the device where `size` is given and limits are ints or tensors on it, so the build
    can be traced and captured; the values of tensors are not checked then. Raises `InvalidRequest` for a limit out of
    range.
    """
    batch, levels, width = scorer.candidates.shape
    children = children_per_node(node_topk, width)
    device = scorer.candidates.device
    if early_stop is None:
        early_stop = device.type == "cpu" and not torch.compiler.is_compiling()
    if early_stop:
        if device.type != "cpu":
            raise InvalidRequest("early_stop builds on the host; leave it out for tensors on another device")
        budget = per_sequence(budgets, batch, 0, "budgets")
        budget = [min(b, b if size is None else size) for b in budget]
        depth_limit = [min(d, levels) for d in per_sequence(max_depth, batch, levels, "max_depth")]
        trie = scorer.trie() if native.available() else None
        if trie is not None:
            return build_heap(trie, budget, children, depth_limit, sizing)
        limits = (torch.tensor(values, dtype=torch.int64) for values in (budget, depth_limit))
        return trimmed(build_layers(scorer, next(limits), max(budget, default=0), children, next(limits)))
    if size is None:
        size = max(per_sequence(budgets, batch, 0, "budgets"), default=0)
    budget_rows = _on_device(budgets, batch, device, "budgets")
    depth_rows = _on_device(levels if max_depth is None else max_depth, batch, device, "max_depth")
    return build_layers(scorer, budget_rows, size, children, depth_rows)


def _on_device(limit: Limit, batch: int, device: torch.device, name: str) -> Tensor:
    """The limit as int64 `[B]` without a look at a tensor's values."""
    if isinstance(limit, Tensor):
        if limit.dim() and len(limit) != batch:
            raise InvalidRequest(f"{name} has {len(limit)} entries for {batch} sequences; give one each")
        return limit.to(device=device, dtype=torch.int64).expand(batch)
    if isinstance(limit, int):
        return torch.full((batch,), limit, dtype=torch.int64, device=device)
    return torch.tensor(per_sequence(limit, batch, 0, name), dtype=torch.int64, device=device)
