"""How far a drafter's probabilities can be believed, learned while decoding.

Path probabilities of a Domino drafter are over-confident: they are normalised within the M candidates, and errors
multiply along a path. A node has a label only if its parent was walked, that is if the target was asked what follows
the parent: then each of the parent's children was or was not what the target chose. From these labels a logistic map
(Platt scaling) q = sigmoid(slope * logit(p) + offset) is fitted per depth, recursively, older rounds counting less.
q < 1 always, so products of q along a path keep a child below its parent.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, isfinite, log
from pathlib import Path

from dominotree.errors import InvalidRequest
from dominotree.files import write_whole

_PRIOR_MEAN = (0.92, -0.5)
_PRIOR_PRECISION = 30.0
_LARGEST_STEP = 0.25
_LEAST_SLOPE = 0.05  # so that a likelier node never counts for less
_FORGET = 0.998
_CLIP = 1e-4


@dataclass
class Calibration:
    """Per depth the mean `(slope, offset)` and its precision `((slope, both), (both, offset))`.

    The prior is what a freshly trained drafter shows, so that the first rounds are sane. Rounds have a handful of
    nodes, so all of it is plain numbers: an array operation would cost more than it computes.
    """

    mean: list[tuple[float, float]]
    precision: list[tuple[tuple[float, float], tuple[float, float]]]

    @classmethod
    def fresh(cls, depths: int) -> Calibration:
        """Nothing learned yet."""
        prior = ((_PRIOR_PRECISION, 0.0), (0.0, _PRIOR_PRECISION))
        return cls([_PRIOR_MEAN] * depths, [prior] * depths)

    def acceptance(self, depth: int, conditional: float) -> float:
        """The chance that the target agrees with a node at `depth` of probability `conditional` below its parent."""
        slope, offset = self.mean[depth]
        return _sigmoid(slope * _logit(conditional) + offset)

    def observe(self, depth: int, conditional: Sequence[float], chosen: int | None) -> None:
        """Learns from a walked node's children: `chosen` is the index of the one the target took, None for none."""
        if not len(conditional):
            return
        slope, offset = self.mean[depth]
        (aa, ab), (_, bb) = self.precision[depth]
        aa, ab, bb = (_PRIOR_PRECISION * (1 - _FORGET) + _FORGET * aa, _FORGET * ab,
                      _PRIOR_PRECISION * (1 - _FORGET) + _FORGET * bb)  # fmt: skip
        up_a = up_b = 0.0
        for i, p in enumerate(conditional):
            x = _logit(p)
            agreed = _sigmoid(slope * x + offset)
            weight, wrong = agreed * (1 - agreed), (i == chosen) - agreed
            aa, ab, bb = aa + weight * x * x, ab + weight * x, bb + weight
            up_a, up_b = up_a + wrong * x, up_b + wrong
        self.precision[depth] = ((aa, ab), (ab, bb))
        scale = 1 / (aa * bb - ab * ab)  # Newton's step: the inverse of the precision times the gradient
        self.mean[depth] = (
            max(slope + _clipped(scale * (bb * up_a - ab * up_b)), _LEAST_SLOPE),
            offset + _clipped(scale * (aa * up_b - ab * up_a)),
        )

    def save(self, path: Path) -> None:
        """Writes JSON, atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"mean": self.mean, "precision": self.precision}))

    @classmethod
    def load(cls, path: Path, depths: int) -> Calibration:
        """Reads what `save` wrote for so many depths; raises `InvalidRequest` for anything else."""
        try:
            held = json.loads(path.read_text())
            mean = [(max(float(slope), _LEAST_SLOPE), float(offset)) for slope, offset in held["mean"]]
            precision = [((float(aa), float(ab)), (float(ab), float(bb))) for (aa, ab), (_, bb) in held["precision"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(f"{path} holds no calibration ({error}); delete it and it is learned again") from error
        numbers = [x for depth in mean for x in depth] + [x for rows in precision for row in rows for x in row]
        if not len(mean) == len(precision) == depths or not all(map(isfinite, numbers)):
            raise InvalidRequest(f"{path} holds a calibration of the wrong shape; delete it and it is learned again")
        return cls(mean, precision)


def _logit(p: float) -> float:
    p = min(max(p, _CLIP), 1 - _CLIP)
    return log(p / (1 - p))


def _sigmoid(z: float) -> float:
    e = exp(-abs(z))
    return (1.0 if z >= 0 else e) / (1 + e)


def _clipped(step: float) -> float:
    return min(max(step, -_LARGEST_STEP), _LARGEST_STEP)
