"""Best-first building in waves: the form for the CPU, where lanes cost time and waiting does not.

The tree is the n best nodes of the whole trie, so nodes may be expanded in any order and several at once. A
wave expands the best few nodes not yet expanded, whatever their depth, and keeps the n best of all nodes
seen. Once every node kept has been expanded, the kept ones are the tree: a node that is not among them was
dropped, or descends from one that was, and n kept nodes come before that one.
"""

from dataclasses import replace
from itertools import groupby
from math import isqrt
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
_Lane = tuple[int, _Node | None]  # a sequence, and its node whose children are scored next (None: the root)
_LOWEST = float(np.finfo(np.float32).min)  # what is not finite never enters


def build_waves(scorer: Scorer, budget: list[int], children: int, depth_limit: list[int]) -> Trees:
    """The `budget[b]` best nodes of each trie, at most `children` per node and `depth_limit[b]` levels."""
    kept: list[list[_Node]] = [[] for _ in budget]
    lanes: list[_Lane] = [(b, None) for b, n in enumerate(budget) if n > 0 and depth_limit[b] > 0]
    states = _States(scorer, sum(budget) + len(budget))
    while lanes:
        sequence = [b for b, _ in lanes]
        depth = [0 if node is None else node[1] + 1 for _, node in lanes]
        log_prob = scorer.log_probs_at(sequence, depth, states.of(lanes)).numpy()
        _add_children(kept, lanes, log_prob, budget, children)
        lanes = []
        for b in dict.fromkeys(sequence):
            kept[b].sort()
            del kept[b][budget[b] :]
            lanes += _next_lanes(kept[b], b, depth_limit[b], budget[b])
    return _assemble(scorer.tokens, kept)


class _States:
    """The states of all expanded nodes, in slots; the roots' are the first."""

    def __init__(self, scorer: Scorer, capacity: int) -> None:
        self._scorer = scorer
        roots = scorer.root_state()
        self._slots = roots.new_empty(capacity, roots.shape[1])
        self._slots[: len(roots)] = roots
        self._used = len(roots)
        self._draft_ids = scorer.candidates.numpy()

    def of(self, lanes: list[_Lane]) -> Tensor:
        """States `[L, S]` of the lanes; a node gets its slot here."""
        parents, draft_ids = [], []
        for slot, (b, node) in enumerate(lanes, self._used):
            if node is None:
                return self._slots.index_select(0, torch.tensor([b for b, _ in lanes]))  # the first wave is all roots
            _, depth, parent, place, rows = node
            rows[0] = slot
            parents.append(b if parent is None else parent[4][0])
            draft_ids.append(self._draft_ids[b, depth, place])
        if not self._slots.shape[1]:
            return self._slots.new_empty(len(lanes), 0)
        above, chosen = torch.from_numpy(np.array([parents, draft_ids], dtype=np.int64)).unbind(0)
        state = self._scorer.advance(self._slots.index_select(0, above), chosen)
        end = self._used + len(lanes)
        if end > len(self._slots):
            self._slots = torch.cat([self._slots, self._slots.new_empty(end, self._slots.shape[1])])
        self._slots[self._used : end] = state
        self._used = end
        return state


def _next_lanes(kept: list[_Node], b: int, depth_limit: int, budget: int) -> list[_Lane]:
    """The best nodes not expanded yet, by depth so that lanes of a depth stand side by side."""
    # The last node of a full tree is left alone: its children could only come after it.
    waiting: list[_Lane] = [(b, node) for node in kept[: budget - 1] if node[4][0] < 0 and node[1] + 1 < depth_limit]
    # More lanes a wave make fewer waves, but expand nodes that a better one's children would have pushed out;
    # this many took least time over budgets from 8 to 128 and flat to peaked logits.
    del waiting[2 * isqrt(budget) :]
    waiting.sort(key=_depth)
    return waiting


def _depth(lane: _Lane) -> int:
    return -1 if lane[1] is None else lane[1][1]


def _add_children(
    kept: list[list[_Node]], lanes: list[_Lane], log_prob: np.ndarray, budget: list[int], children: int
) -> None:
    """Append the children `[L, M]` of all lanes that may still be among the best of their tree."""
    above = [0.0 if node is None else -node[0] for _, node in lanes]
    least = [-kept[b][-1][0] if len(kept[b]) == budget[b] else _LOWEST for b, _ in lanes]
    bounds = np.array([above, least], dtype=np.float32)[:, :, None]
    scores = bounds[0] + log_prob
    enters = scores >= bounds[1]
    if children < log_prob.shape[1]:
        for i in np.flatnonzero(enters.sum(axis=1) > children).tolist():
            enters[i, np.argsort(-log_prob[i], kind="stable")[children:]] = False
    flat = np.flatnonzero(enters)
    if len(flat) > min(budget[b] for b, _ in lanes):
        _drop_hopeless(enters, scores, lanes, budget)
        flat = np.flatnonzero(enters)
    width = log_prob.shape[1]
    for at, score in zip(flat.tolist(), scores.ravel()[flat].tolist(), strict=True):
        lane, place = divmod(at, width)
        b, node = lanes[lane]
        kept[b].append((-score, 0 if node is None else node[1] + 1, node, place, [-1, -1]))


def _drop_hopeless(enters: np.ndarray, scores: np.ndarray, lanes: list[_Lane], budget: list[int]) -> None:
    """Clear in `enters [L, M]` the children that the wave itself already outnumbers."""
    for b, group in groupby(range(len(lanes)), key=lambda i: lanes[i][0]):
        rows = list(group)
        own = slice(rows[0], rows[-1] + 1)
        entering = scores[own][enters[own]]
        if len(entering) > budget[b]:
            enters[own] &= scores[own] >= np.partition(entering, -budget[b])[-budget[b]]


def _assemble(tokens: Tensor, kept: list[list[_Node]]) -> Trees:
    batch, levels, _ = tokens.shape
    size = max((len(nodes) for nodes in kept), default=0)
    trees = Trees.empty(batch, size)
    token, parent, depth = trees.token.numpy(), trees.parent.numpy(), trees.depth.numpy()
    score, count = trees.score.numpy(), trees.count.numpy()
    known = tokens.numpy()
    for b, nodes in enumerate(kept):
        if not nodes:
            continue
        for row, node in enumerate(nodes):
            node[4][1] = row
        negated, depths, parents, places, _ = zip(*nodes, strict=True)
        n = len(nodes)
        token[b, :n] = known[b, depths, places]
        parent[b, :n] = [-1 if above is None else above[4][1] for above in parents]
        depth[b, :n] = depths
        np.negative(negated, out=score[b, :n], casting="same_kind")
        count[b] = n
    return replace(trees, levels=levels)
