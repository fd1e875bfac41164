"""How many nodes a round is worth: the cost-aware rule of CaDDTree (arXiv 2606.01813)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Sizing:
    """What a builder needs that ends a tree where one more node would not pay.

    `costs[b][n]` is the time of a round in which sequence b verifies n nodes. A node's chance to be accepted is its
    probability or, with `calibration`, `(slope, offset)` per depth, sigmoid(slope * logit(probability) + offset) along
    its path.
    """

    costs: Sequence[Sequence[float]]
    calibration: Sequence[tuple[float, float]] | None = None


def cost_aware_count(probabilities: Sequence[float], cost: Sequence[float]) -> int:
    """The number of leading nodes to verify.

    `probabilities[i]` is the chance that node i (best first) is accepted, `cost[n]` the time of a round that verifies
    n nodes, for n = 0 .. len(probabilities) at least. Nodes are added while
    (1 + phi(n + 1)) / cost(n + 1) > (1 + phi(n)) / cost(n), phi being the running sum of the probabilities. With a
    convex cost the ratio has one peak, so the first decrease is the end.
    """
    gained = 1.0
    for count, chance in enumerate(probabilities):
        if (gained + chance) / cost[count + 1] <= gained / cost[count]:
            return count
        gained += chance
    return len(probabilities)
