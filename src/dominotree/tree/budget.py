"""How many nodes a round is worth: the cost-aware rule of CaDDTree (arXiv 2606.01813)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Sizing:
    """What a builder needs that ends a tree where one more node would not pay.

    `costs[b][n]` is the time of a round in which sequence b verifies n nodes, `rates[b]` as for `cost_aware_count`
    (None: 0 for all). A node's chance to be accepted is its probability or, with `calibration`, `(slope, offset)` per
    depth, sigmoid(slope * logit(probability) + offset) along its path.
    """

    costs: Sequence[Sequence[float]]
    calibration: Sequence[tuple[float, float]] | None = None
    rates: Sequence[float] | None = None


def cost_aware_count(probabilities: Sequence[float], cost: Sequence[float], rate: float = 0.0) -> int:
    """The number of leading nodes to verify.

    `probabilities[i]` is the chance that node i (best first) is accepted, `cost[n]` the time of a round that verifies
    n nodes, for n = 0 .. len(probabilities) at least. The number is the least that makes (1 + phi(n)) / cost(n)
    largest, phi being the running sum of the probabilities.

    That makes each round as fast as it can be. A whole answer is fastest where every round counts a unit of time for
    the same, what it yields on average: with `rate`, tokens per unit of time, the number makes phi(n) - rate * cost(n)
    largest.
    """
    gained = 1.0
    best, count = (-rate * cost[0] if rate else gained / cost[0]), 0
    for n, chance in enumerate(probabilities, 1):
        gained += chance
        worth = gained - 1 - rate * cost[n] if rate else gained / cost[n]
        if worth > best:
            best, count = worth, n
    return count
