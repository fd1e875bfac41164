"""Whether a drafter's probabilities come true: nodes of the trees that were verified, binned by what was predicted."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from dominotree.bench.records import CALIBRATION_BINS
from dominotree.generation import Round


def bins_of(label: str, rounds: Iterable[Round]) -> list[dict[str, Any]]:
    """Bins of `{label, depth, n, mean_predicted, accepted_rate}` over all nodes of the rounds' trees.

    A node is predicted with its path probability (calibrated, where the method calibrates) and accepted if it was
    committed, so every node has a label. `depth` counts from 0.
    """
    sums: dict[tuple[int, int], list[float]] = {}
    for one in rounds:
        accepted = set(one.path)
        for node, (depth, score) in enumerate(zip(one.tree.depth, one.tree.score, strict=True)):
            predicted = min(math.exp(score), 1.0)
            total = sums.setdefault((depth, min(int(predicted * CALIBRATION_BINS), CALIBRATION_BINS - 1)), [0, 0.0, 0])
            total[0] += 1
            total[1] += predicted
            total[2] += node in accepted
    return [
        {"label": label, "depth": depth, "n": n, "mean_predicted": predicted / n, "accepted_rate": accepted / n}
        for (depth, _), (n, predicted, accepted) in sorted(sums.items())
    ]
