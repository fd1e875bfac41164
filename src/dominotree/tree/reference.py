"""The plain best-first heap that the fast builder is compared with, node by node."""

import heapq
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dominotree.tree.limits import Limit, children_per_node, per_sequence
from dominotree.tree.scorers import Scorer
from dominotree.tree.tree import Trees


@dataclass
class _Nodes:
    """The nodes of one growing tree, in the order they were taken."""

    place: list[int] = field(default_factory=list)
    parent: list[int] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)
    score: list[float] = field(default_factory=list)
    state: list[Tensor] = field(default_factory=list)


def build_reference(
    scorer: Scorer, budgets: Limit, *, node_topk: int | None = None, max_depth: Limit | None = None
) -> Trees:
    """The `budgets` best-scored nodes of each sequence's trie, taken one by one from a heap (DominoTree).

    `node_topk` caps the children of a node to its best by log-probability, then place among the candidates.
    `max_depth` caps the length of a path. Ties fall by score (fp32, the parent's plus the log-probability)
    descending, depth, the parent's place in the tree, place among the candidates. A node of probability 0 is
    never taken. Raises `InvalidRequest` for a limit out of range.
    """
    batch, levels, width = scorer.candidates.shape
    children = children_per_node(node_topk, width)
    budget = per_sequence(budgets, batch, 0, "budgets")
    depth_limit = [min(d, levels) for d in per_sequence(max_depth, batch, levels, "max_depth")]
    roots = scorer.root_state()
    trees = [_grow(scorer, b, roots[b : b + 1], budget[b], children, depth_limit[b]) for b in range(batch)]
    return _assemble(scorer.tokens, trees, levels)


def _grow(scorer: Scorer, b: int, root: Tensor, budget: int, children: int, depth_limit: int) -> _Nodes:
    nodes = _Nodes()
    heap: list[tuple[float, int, int, int]] = []  # negated score, depth, parent, place: the tie rule itself

    def offer_children(parent: int, depth: int, state: Tensor, score: float) -> None:
        log_prob = scorer.log_probs_at(b, depth, state).cpu().numpy()
        places = np.sort(np.argsort(-log_prob, kind="stable")[:children])
        scores = np.float32(score) + log_prob[places]
        best = np.argsort(-scores, kind="stable")[:budget]
        for place, child_score in zip(places[best].tolist(), scores[best].tolist(), strict=True):
            if child_score > -np.inf:
                heapq.heappush(heap, (-child_score, depth, parent, place))

    if budget and depth_limit:
        offer_children(-1, 0, root, 0.0)
    while heap:
        negated, depth, parent, place = heapq.heappop(heap)
        node = len(nodes.place)
        nodes.place.append(place)
        nodes.parent.append(parent)
        nodes.depth.append(depth)
        nodes.score.append(-negated)
        if len(nodes.place) == budget:
            break
        above = root if parent < 0 else nodes.state[parent]
        if depth + 1 < depth_limit:
            state = scorer.advance(above, scorer.candidates[b, depth, place][None])
            offer_children(node, depth + 1, state, -negated)
        else:
            state = above
        nodes.state.append(state)
    return nodes


def _assemble(tokens: Tensor, trees: list[_Nodes], levels: int) -> Trees:
    size = max((len(t.place) for t in trees), default=0)
    out = Trees.empty(len(trees), size, tokens.device)
    for b, tree in enumerate(trees):
        n = len(tree.place)
        depth = torch.tensor(tree.depth, dtype=torch.int64, device=tokens.device)
        place = torch.tensor(tree.place, dtype=torch.int64, device=tokens.device)
        out.token[b, :n] = tokens[b, depth, place]
        out.parent[b, :n] = torch.tensor(tree.parent, dtype=torch.int64)
        out.depth[b, :n] = depth
        out.score[b, :n] = torch.tensor(tree.score, dtype=torch.float32)
        out.count[b] = n
    return Trees(out.token, out.parent, out.depth, out.score, out.count, levels)
