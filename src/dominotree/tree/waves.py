"""Best-first building in waves: the form for the CPU, where lanes cost time and waiting does not.

The tree is the n best nodes of the whole trie, so nodes may be expanded in any order and several at once. A
wave expands the best few nodes not yet expanded, whatever their depth, and keeps the n best of all nodes
seen. Once every node kept has been expanded, the kept ones are the tree: a node that is not among them was
dropped, or descends from one that was, and n kept nodes come before that one.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dominotree.tree.scorers import Scorer
from dominotree.tree.tree import Trees

# (negated score, depth, parent node or None, place, [slot of its state or -1, row in the tree]). Tuples
# compare from the left, nodes of equal score and depth by their parents first, so this *is* the tie rule; two
# nodes never agree in the first four.
_Node = tuple[float, int, Any, int, list[int]]


def build_waves(scorer: Scorer, budget: list[int], children: int, depth_limit: list[int]) -> Trees:
    """The `budget[b]` best nodes of each trie, at most `children` per node and `depth_limit[b]` levels."""
    kept: list[list[_Node]] = [[] for _ in budget]
    lanes: list[tuple[int, _Node | None]] = [
        (b, None) for b, n in enumerate(budget) if n > 0 and depth_limit[b] > 0
    ]
    states = _States(scorer, 2 * sum(budget) + len(budget))
    while lanes:
        sequence = [b for b, _ in lanes]
        depth = [0 if node is None else node[1] + 1 for _, node in lanes]
        state = states.of(sequence, [node for _, node in lanes])
        log_prob = scorer.log_probs_at(sequence, depth, state).numpy()
        least = np.array(
            [-kept[b][-1][0] if len(kept[b]) == budget[b] else -np.inf for b in sequence], dtype=np.float32
        )
        _add_children(kept, lanes, depth, log_prob, least, budget, children)
        lanes = []
        for b in dict.fromkeys(sequence):
            kept[b].sort()
            del kept[b][budget[b] :]
            lanes += _next_lanes(kept[b], b, depth_limit[b], max(2, budget[b] // 4))
    return _assemble(scorer.tokens, kept)


class _States:
    """The states of all expanded nodes, in slots."""

    def __init__(self, scorer: Scorer, capacity: int) -> None:
        self._scorer = scorer
        self._roots = scorer.root_state()
        self._slots = self._roots.new_empty(capacity, self._roots.shape[1])
        self._slots[: len(self._roots)] = self._roots
        self._used = len(self._roots)
        self._ids = scorer.candidates.numpy()

    def of(self, sequence: list[int], nodes: list[_Node | None]) -> Tensor:
        """States `[L, S]` of the nodes (None: the root of its sequence); each node gets its slot."""
        if nodes[0] is None:  # the first wave: roots only
            return self._roots[sequence]
        chosen = [node for node in nodes if node is not None]
        for i, node in enumerate(chosen, self._used):
            node[4][0] = i
        if not self._slots.shape[1]:
            return self._slots.new_empty(len(chosen), 0)
        parents = [b if node[2] is None else node[2][4][0] for b, node in zip(sequence, chosen, strict=True)]
        ids = [int(self._ids[b, node[1], node[3]]) for b, node in zip(sequence, chosen, strict=True)]
        state = self._scorer.advance(self._slots.index_select(0, torch.tensor(parents)), torch.tensor(ids))
        end = self._used + len(chosen)
        if end > len(self._slots):
            self._slots = torch.cat([self._slots, self._slots.new_empty(end, self._slots.shape[1])])
        self._slots[self._used : end] = state
        self._used = end
        return state


def _next_lanes(kept: list[_Node], b: int, depth_limit: int, most: int) -> list[tuple[int, _Node | None]]:
    """The best nodes that are not expanded yet; by depth, so that lanes of a depth stand side by side."""
    lanes: list[tuple[int, _Node | None]] = []
    for node in kept:
        if node[4][0] < 0 and node[1] + 1 < depth_limit:
            lanes.append((b, node))
            if len(lanes) == most:
                break
    lanes.sort(key=_depth)
    return lanes


def _depth(lane: tuple[int, _Node | None]) -> int:
    return -1 if lane[1] is None else lane[1][1]


def _add_children(
    kept: list[list[_Node]],
    lanes: list[tuple[int, _Node | None]],
    depth: list[int],
    log_prob: np.ndarray,
    least: np.ndarray,
    budget: list[int],
    children: int,
) -> None:
    """Append the children of all lanes that may still enter: of finite score, and not below `least [L]`."""
    above = np.array([0.0 if node is None else -node[0] for _, node in lanes], dtype=np.float32)
    scores = above[:, None] + log_prob
    enters = (scores >= least[:, None]) & (scores > -np.inf)
    lane_of, place_of = np.nonzero(enters)
    entering = np.bincount(lane_of, minlength=len(lanes))
    crowded = np.flatnonzero(entering > min(children, *(budget[b] for b, _ in lanes)))
    for i in crowded.tolist():
        places = np.flatnonzero(enters[i])
        enters[i] = False
        enters[i, _best(places, log_prob[i], scores[i], children, budget[lanes[i][0]])] = True
    if crowded.size:
        lane_of, place_of = np.nonzero(enters)
    values = scores[lane_of, place_of]
    for i, place, score in zip(lane_of.tolist(), place_of.tolist(), values.tolist(), strict=True):
        b, node = lanes[i]
        kept[b].append((-score, depth[i], node, place, [-1, -1]))


def _best(
    places: np.ndarray, log_prob: np.ndarray, score: np.ndarray, children: int, budget: int
) -> np.ndarray:
    """The `children` best of `places` by log-probability, and of those the `budget` best by score."""
    if len(places) > children:
        places = np.sort(places[np.argsort(-log_prob[places], kind="stable")[:children]])
    return places[np.argsort(-score[places], kind="stable")[:budget]]


def _assemble(tokens: Tensor, kept: list[list[_Node]]) -> Trees:
    batch, levels, _ = tokens.shape
    size = max((len(nodes) for nodes in kept), default=0)
    parent = np.full((batch, size), -1, dtype=np.int64)
    depth = np.zeros((batch, size), dtype=np.int64)
    place = np.zeros((batch, size), dtype=np.int64)
    score = np.full((batch, size), -np.inf, dtype=np.float32)
    for b, nodes in enumerate(kept):
        n = len(nodes)
        for row, node in enumerate(nodes):
            node[4][1] = row
        parent[b, :n] = [-1 if node[2] is None else node[2][4][1] for node in nodes]
        depth[b, :n] = [node[1] for node in nodes]
        place[b, :n] = [node[3] for node in nodes]
        score[b, :n] = [-node[0] for node in nodes]
    token = tokens.numpy()[np.arange(batch)[:, None], depth, place]
    count = np.array([len(nodes) for nodes in kept], dtype=np.int64)
    token[np.arange(size) >= count[:, None]] = 0
    return Trees(
        token=torch.from_numpy(token),
        parent=torch.from_numpy(parent),
        depth=torch.from_numpy(depth),
        score=torch.from_numpy(score),
        count=torch.from_numpy(count),
        levels=levels,
    )
