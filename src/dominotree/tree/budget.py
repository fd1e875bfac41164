"""How many nodes a round is worth: the cost-aware rule of CaDDTree (arXiv 2606.01813)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def cost_aware_count(probabilities: Sequence[float] | npt.NDArray[np.float64], cost: npt.NDArray[np.float64]) -> int:
    """The number of leading nodes to verify.

    `probabilities[i]` is the chance that node i (best first) is accepted, `cost[n]` the time of a round that verifies
    n nodes, for n = 0 .. len(probabilities) at least. Nodes are added while
    (1 + phi(n + 1)) / cost(n + 1) > (1 + phi(n)) / cost(n), phi being the running sum of the probabilities. With a
    convex cost the ratio has one peak, so the first decrease is the end.
    """
    gained = 1.0 + np.concatenate(([0.0], np.cumsum(np.asarray(probabilities, dtype=np.float64))))
    rate = gained / cost[: len(gained)]
    falls = np.flatnonzero(rate[1:] <= rate[:-1])
    return int(falls[0]) if len(falls) else len(gained) - 1
