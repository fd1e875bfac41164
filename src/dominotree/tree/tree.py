"""The draft tree: flat arrays in best-first order, batched over sequences."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import exp
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Trees:
    """B draft trees of at most n nodes each; the root is not among the nodes.

    Nodes stand in best-first order, so a parent comes before its children and every leading part of a tree is
    a tree. Rows from `count` on are padding: token 0, parent -1, depth 0, score -inf.
    """

    token: Tensor
    """`[B, n]` int64, target token ids."""
    parent: Tensor
    """`[B, n]` int64, the parent's row; -1 for a child of the root."""
    depth: Tensor
    """`[B, n]` int64, 0 for a child of the root."""
    score: Tensor
    """`[B, n]` fp32, sum of log-probabilities from the root."""
    count: Tensor
    """`[B]` int64, nodes that are not padding."""
    levels: int | None = None
    """No path is longer than this; None where only n bounds it."""
    given: Tensor | None = None
    """`[B, n]` fp32, log-probabilities below the parents, where scores are not their sums: trees that were sized."""

    @classmethod
    def empty(cls, batch: int, size: int = 0, device: torch.device | str = "cpu") -> "Trees":
        """Trees without a node, `size` rows of padding each."""
        return cls(
            token=torch.zeros(batch, size, dtype=torch.int64, device=device),
            parent=torch.full((batch, size), -1, dtype=torch.int64, device=device),
            depth=torch.zeros(batch, size, dtype=torch.int64, device=device),
            score=torch.full((batch, size), -torch.inf, device=device),
            count=torch.zeros(batch, dtype=torch.int64, device=device),
            levels=0,
        )

    @property
    def batch(self) -> int:
        """Number of trees, B."""
        return self.token.shape[0]

    @property
    def size(self) -> int:
        """Rows per tree, n."""
        return self.token.shape[1]

    def positions(self) -> Tensor:
        """Position relative to the root's, int64 `[B, n+1]`: 0 for the root, depth + 1 for a node."""
        return torch.cat([self.depth.new_zeros(self.batch, 1), self.depth + 1], dim=1)

    def ancestor_mask(self) -> Tensor:
        """Who sees whom among `[root, nodes...]`, bool `[B, n+1, n+1]`.

        Row i is True at the root, at the ancestors of i and at i; a padding row sees only itself.
        """
        size = self.size + 1
        rows = torch.arange(size, device=self.token.device)
        is_node = (rows > 0) & (rows <= self.count[:, None])
        above = torch.cat([self.parent.new_zeros(self.batch, 1), self.parent + 1], dim=1)
        above = torch.where(is_node, above, rows)
        mask = torch.eye(size, dtype=torch.bool, device=self.token.device).repeat(self.batch, 1, 1)
        seen = above
        for _ in range(self.size if self.levels is None else min(self.levels, self.size)):
            mask.scatter_(2, seen[:, :, None], True)
            seen = above.gather(1, seen)
        return mask

    def first(self, counts: Tensor) -> "Trees":
        """The leading `counts [B]` nodes of each tree, the rest turned into padding; shapes stay."""
        count = torch.minimum(self.count, counts.to(self.count))
        keep = torch.arange(self.size, device=count.device) < count[:, None]
        return replace(
            self,
            token=self.token.where(keep, 0),
            parent=self.parent.where(keep, -1),
            depth=self.depth.where(keep, 0),
            score=self.score.where(keep, -torch.inf),
            count=count,
            given=None if self.given is None else self.given.where(keep, -torch.inf),
        )

    def single(self, b: int) -> "Tree":
        """Tree b as Python lists, padding dropped."""
        token, parent, depth, score, given = (column[b][: self._lists[0][b]] for column in self._lists[1:])
        if self.given is None:
            given = [s - (score[p] if p >= 0 else 0.0) for s, p in zip(score, parent, strict=True)]
        return Tree(token, parent, depth, score, [exp(log_prob) for log_prob in given])

    @cached_property
    def _lists(self) -> list[list[Any]]:
        """Counts, tokens, parents, depths, scores and `given` (if there is any) as Python lists."""
        given = self.score if self.given is None else self.given
        return [column.tolist() for column in (self.count, self.token, self.parent, self.depth, self.score, given)]


@dataclass(frozen=True)
class Tree:
    """One draft tree on the host, for walking. A node is its row; the root is -1."""

    token: list[int] = field(default_factory=list)
    parent: list[int] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)
    score: list[float] = field(default_factory=list)
    given: list[float] = field(default_factory=list)
    """Each node's probability below its parent, as the drafter gave it; 0 where another source proposed it."""

    def __len__(self) -> int:
        return len(self.token)

    @cached_property
    def _child(self) -> dict[tuple[int, int], int]:
        return {edge: node for node, edge in enumerate(zip(self.parent, self.token, strict=True))}

    def child_with_token(self, node: int, token: int) -> int | None:
        """The child of `node` (-1: the root) that proposes `token`, or None."""
        return self._child.get((node, token))

    def first(self, count: int) -> "Tree":
        """The leading `count` nodes."""
        return Tree(self.token[:count], self.parent[:count], self.depth[:count], self.score[:count], self.given[:count])

    def pruned(self, fits: Callable[[list[int]], bool]) -> "Tree":
        """Without the nodes whose path (the tokens from depth 0 down to them) does not fit, nor what is below them."""
        paths: dict[int, list[int]] = {-1: []}
        for node, parent in enumerate(self.parent):
            if parent in paths and fits(path := [*paths[parent], self.token[node]]):
                paths[node] = path
        kept = list(paths)[1:]
        return self if len(kept) == len(self) else self._only(kept, self.score)

    def reordered(self, score: list[float]) -> "Tree":
        """The same nodes with other path scores, best first again; a child's score must not exceed its parent's."""
        order = sorted(range(len(self)), key=lambda node: -score[node])  # stable: parents stay before children
        return self._only(order, score)

    def _only(self, order: list[int], score: list[float]) -> "Tree":
        """The nodes in `order`, parents before children, with the scores `score[node]`."""
        place = {node: i for i, node in enumerate(order)}
        return Tree(
            token=[self.token[node] for node in order],
            parent=[place.get(self.parent[node], -1) for node in order],
            depth=[self.depth[node] for node in order],
            score=[score[node] for node in order],
            given=[self.given[node] for node in order],
        )

    def children(self, node: int) -> list[int]:
        """The children of `node` (-1: the root), best first."""
        return [child for child, parent in enumerate(self.parent) if parent == node]

    def path(self, node: int) -> list[int]:
        """The nodes from depth 0 down to and including `node`; empty for the root."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parent[node]
        return nodes[::-1]
