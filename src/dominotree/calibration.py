"""How far a drafter's probabilities can be believed, learned while decoding.

Path probabilities of a Domino drafter are over-confident: they are normalised within the M candidates, and errors
multiply along a path. A node has a label only if its parent was walked, that is if the target was asked what follows
the parent: then each of the parent's children was or was not what the target chose. From these labels a logistic map
(Platt scaling) q = sigmoid(slope * logit(p) + offset) is fitted per depth, recursively, older rounds counting less.
q < 1 always, so products of q along a path keep a child below its parent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dominotree.errors import InvalidRequest

Floats = npt.NDArray[np.float64]

_PRIOR_MEAN = (0.92, -0.5)
_PRIOR_PRECISION = ((30.0, 0.0), (0.0, 30.0))
_LARGEST_STEP = 0.25
_FORGET = 0.998
_CLIP = 1e-4


@dataclass
class Calibration:
    """Slope and offset per depth, with the precision of both.

    `mean` `[depths, 2]`, `precision` `[depths, 2, 2]`. The prior is what a freshly trained drafter shows, so that the
    first rounds are sane.
    """

    mean: Floats
    precision: Floats

    @classmethod
    def fresh(cls, depths: int) -> Calibration:
        """Nothing learned yet."""
        return cls(np.tile(np.array(_PRIOR_MEAN), (depths, 1)), np.tile(np.array(_PRIOR_PRECISION), (depths, 1, 1)))

    def acceptance(self, depth: npt.NDArray[np.int64], conditional: Floats) -> Floats:
        """The chance that the target agrees with nodes at `depth` of probability `conditional` below their parent."""
        x = _features(conditional)
        z = np.einsum("nf,nf->n", x, self.mean[depth])
        agreed: Floats = 1.0 / (1.0 + np.exp(-z))
        return agreed

    def observe(self, depth: int, conditional: Sequence[float] | Floats, chosen: int | None) -> None:
        """Learns from a walked node's children: `chosen` is the index of the one the target took, None for none."""
        if not len(conditional):
            return
        x = _features(np.asarray(conditional, dtype=np.float64))
        y = np.zeros(len(x))
        if chosen is not None:
            y[chosen] = 1.0
        mean = self.mean[depth]
        agreed = 1.0 / (1.0 + np.exp(-x @ mean))
        prior = np.array(_PRIOR_PRECISION)
        precision = prior + _FORGET * (self.precision[depth] - prior) + (x * (agreed * (1 - agreed))[:, None]).T @ x
        self.precision[depth] = precision
        step = np.linalg.solve(precision, x.T @ (y - agreed))
        self.mean[depth] = mean + np.clip(step, -_LARGEST_STEP, _LARGEST_STEP)

    def save(self, path: Path) -> None:
        """Writes JSON, atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}.tmp")
        scratch.write_text(json.dumps({"mean": self.mean.tolist(), "precision": self.precision.tolist()}))
        scratch.replace(path)

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """Reads what `save` wrote; raises `InvalidRequest` for anything else."""
        try:
            held = json.loads(path.read_text())
            mean, precision = np.array(held["mean"], dtype=np.float64), np.array(held["precision"], dtype=np.float64)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(f"{path} holds no calibration ({error}); delete it and it is learned again") from error
        if mean.ndim != 2 or precision.shape != (len(mean), 2, 2) or not np.isfinite(mean).all():
            raise InvalidRequest(f"{path} holds a calibration of the wrong shape; delete it and it is learned again")
        return cls(mean, precision)


def _features(conditional: Floats) -> Floats:
    p = np.clip(conditional, _CLIP, 1 - _CLIP)
    return np.column_stack([np.log(p / (1 - p)), np.ones_like(p)])
