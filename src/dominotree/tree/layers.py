"""Depth-synchronous building with fixed shapes: the form for accelerators.

One layer of lanes a depth, every sequence at once, and nothing that waits for the device, so that the whole
build can be traced or captured in a CUDA graph. A layer's nodes are kept in the order score descending,
parent's place in its layer, place among the candidates; merging it, stably, behind the n best of the layers
above gives the tie rule, and members that do not make the n best so far can never enter, nor can their
descendants.
"""

import torch
from torch import Tensor

from dominotree.tree.order import stable_topk
from dominotree.tree.scorers import Scorer
from dominotree.tree.tree import Trees


def build_layers(scorer: Scorer, budget: Tensor, size: int, children: int, depth_limit: Tensor) -> Trees:
    """The best `budget [B]` nodes, at most `size`, of each trie, at most `children` per node.

    `depth_limit [B]` caps the length of paths. The result has `size` rows, padding behind a tree's nodes; a
    budget above `size` counts as `size`.
    """
    batch, levels, _ = scorer.candidates.shape
    best = Trees.empty(batch, 0, scorer.candidates.device)
    tokens = scorer.tokens
    best_id = best.token  # [B, <=n]: number of a node, counted through all layers
    parent_ids: list[Tensor] = []  # per layer [B, L]
    state = scorer.root_state()[:, None]  # [B, L, S]
    score = torch.zeros(batch, 1, device=state.device)  # [B, L]; -inf for a lane that is no longer alive
    ids = torch.full_like(score, -1, dtype=torch.int64)
    for depth in range(levels if size else 0):
        score = torch.where(depth_limit[:, None] > depth, score, -torch.inf)
        layer_score, lane, place = _layer(scorer.log_probs(depth, state), score, size, children)
        parent_id = ids.gather(1, lane)
        first = sum(p.shape[1] for p in parent_ids)
        parent_ids.append(parent_id)
        ids = torch.arange(first, first + lane.shape[1], device=lane.device).expand(batch, -1)
        token = tokens[:, depth].gather(1, place)

        known = best.size
        merged, order = stable_topk(torch.cat([best.score, layer_score], 1), min(size, known + lane.shape[1]))
        within = torch.arange(merged.shape[1], device=order.device) < budget[:, None]
        merged = torch.where(within, merged, -torch.inf)
        best = Trees(
            token=torch.cat([best.token, token], 1).gather(1, order),
            parent=torch.cat([best.parent, parent_id], 1).gather(1, order),
            depth=torch.cat([best.depth, torch.full_like(token, depth)], 1).gather(1, order),
            score=merged,
            count=(merged > -torch.inf).sum(1),
            levels=levels,
        )
        best_id = torch.cat([best_id, ids], 1).gather(1, order)
        # A layer is sorted by score, so its members among the best are its leading ones.
        alive = ((order >= known) & (merged > -torch.inf)).sum(1, keepdim=True)
        score = torch.where(torch.arange(lane.shape[1], device=lane.device) < alive, layer_score, -torch.inf)
        if depth + 1 < levels:
            parent_state = state.gather(1, lane[:, :, None].expand(-1, -1, state.shape[2]))
            state = scorer.advance(parent_state, scorer.candidates[:, depth].gather(1, place))
    return _finish(best, best_id, parent_ids, size, levels)


def _layer(log_prob: Tensor, score: Tensor, size: int, children: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best `size` children of lanes `score [B, L]`, `log_prob [B, L, M]`: score, lane and place."""
    place = torch.arange(log_prob.shape[2], device=log_prob.device).expand(log_prob.shape)
    if children < log_prob.shape[2]:
        # Back into order of place: log-probabilities that differ may add up to equal scores.
        place, _ = torch.sort(stable_topk(log_prob, children)[1], dim=-1)
        log_prob = log_prob.gather(-1, place)
    scores = (score[:, :, None] + log_prob).flatten(1)
    child_score, order = stable_topk(scores, min(size, scores.shape[1]))
    return child_score, order // children, place.flatten(1).gather(1, order)


def _finish(best: Trees, best_id: Tensor, parent_ids: list[Tensor], size: int, levels: int) -> Trees:
    """Turn parents from node numbers into rows, and pad to `size` rows."""
    if not parent_ids:
        return Trees.empty(best.batch, size, best.token.device)
    total = sum(p.shape[1] for p in parent_ids)
    rows = torch.arange(best.size, device=best_id.device).expand_as(best_id)
    row_of = torch.zeros_like(best_id[:, :1]).expand(-1, total).scatter(1, best_id, rows)
    parent = torch.where(best.parent < 0, -1, row_of.gather(1, best.parent.clamp(min=0)))
    padded = Trees.empty(best.batch, size - best.size, best.token.device)
    trees = Trees(
        token=torch.cat([best.token, padded.token], 1),
        parent=torch.cat([parent, padded.parent], 1),
        depth=torch.cat([best.depth, padded.depth], 1),
        score=torch.cat([best.score, padded.score], 1),
        count=best.count,
        levels=levels,
    )
    return trees.first(best.count)
