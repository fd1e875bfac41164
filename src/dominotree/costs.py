"""What a round costs on this machine: measured once per pair, fitted, kept, used by the cost-aware budgets."""

from __future__ import annotations

import hashlib
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dominotree.drafters.dflash import Draft, Drafter
from dominotree.errors import InvalidRequest
from dominotree.files import write_whole
from dominotree.hub import cache_dir
from dominotree.machine import cpu_name
from dominotree.methods import Drafting, grow
from dominotree.targets.base import Target
from dominotree.targets.rows import Segment
from dominotree.tree.tree import Tree

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 16, 17, 24, 33, 48, 65)
"""All the small ones, and both sides of where kernels may step up."""
CONTEXTS = (64, 256, 768, 1792)
DEPTHS = (1, 2, 3, 4, 5, 6, 8, 11, 15)
"""As far as a drafter has them, and all that it has."""
SEQUENCES = 4
"""Sequences that are measured together, to tell what another one costs."""
REPEATS = 9

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class CostModel:
    """Milliseconds of a round's stages.

    `verify_ms[c][r]` is fitted for context `contexts[c]` and `rows[r]` rows (root included): monotone and convex in
    the rows; `stepped_ms[c][r]` is monotone only, as passes cost whole blocks of rows. `draft_ms[c][d]` is a draft of
    `depths[d]` depths at that context, the drafter's reading of what was committed included, `build_ms[r]` a tree of
    `rows[r] - 1` nodes, `rest_ms` committing rows. All of that is for one sequence; each further one, which has a
    context of its own to be read, adds `verify_each_ms[c]` to a pass of as many rows and `draft_each_ms[c]` to a draft
    of all depths. `key` says what it was measured on.
    """

    key: dict[str, Any]
    contexts: list[int]
    rows: list[int]
    verify_ms: list[list[float]]
    stepped_ms: list[list[float]]
    depths: list[int]
    draft_ms: list[list[float]]
    build_ms: list[float]
    rest_ms: float
    verify_each_ms: list[float]
    draft_each_ms: list[float]
    measured_ms: list[list[float]]

    def verify(self, rows: int, context: int, sequences: int = 1, *, stepped: bool = False) -> Floats:
        """Verify time of 1 .. `rows` rows of so many sequences: linear in between and beyond the last rows, clamped in
        context. By the convex curve or the `stepped` one.
        """
        at = np.arange(1, rows + 1)
        curves = self.stepped_ms if stepped else self.verify_ms
        by_context = np.array([_interpolate(at, self.rows, curve) for curve in curves])
        further = float(np.interp(context, self.contexts, self.verify_each_ms))
        return _at_context(context, self.contexts, by_context) + (sequences - 1) * further

    def round(
        self,
        nodes: int,
        context: int,
        *,
        sequences: int = 1,
        depths: int | None = None,
        sized: bool = False,
        stepped: bool = False,
    ) -> Floats:
        """Time of a round that verifies 0 .. `nodes` nodes in all, `[nodes + 1]`, of trees built to `nodes`.

        If `sized`, of ones built no further than they are verified. `depths` as for `draft`, `stepped` as for `verify`.
        """
        build = _interpolate(np.arange(1, nodes + 2), self.rows, self.build_ms) if sized else self.build(nodes)
        verify = self.verify(nodes + sequences, context, sequences, stepped=stepped)[sequences - 1 :]
        return verify + (self.draft(context, sequences, depths) + build + sequences * self.rest_ms)

    def draft(self, context: int, sequences: int = 1, depths: int | None = None) -> float:
        """Time of a draft of so many depths, None: all, for so many sequences."""
        one = _at_context(context, self.contexts, np.array(self.draft_ms))
        part = float(np.interp(self.depths[-1] if depths is None else depths, self.depths, one))
        further = float(np.interp(context, self.contexts, self.draft_each_ms))
        return part + (sequences - 1) * further * (part / float(one[-1]) if part else 0.0)

    def build(self, nodes: int) -> float:
        """Time of building a tree of `nodes` nodes."""
        return float(_interpolate(np.array([nodes + 1]), self.rows, self.build_ms)[0])

    def plain(self, context: int, sequences: int = 1) -> float:
        """Time of a round without a draft for so many sequences."""
        return float(self.verify(sequences, context, sequences)[-1]) + sequences * self.rest_ms

    @property
    def has_head(self) -> bool:
        """Whether it was measured with a Domino drafter, which has a correction head."""
        return any(self.key["drafter"][3:4])

    @property
    def said(self) -> str:
        """What it was measured on, in words."""
        kind = "Domino" if self.has_head else "DFlash"
        key = self.key
        return f"{key['target']}, {kind} drafter, {key['dtype']}, {key['device']}, {key['threads']} threads"

    def save(self, path: Path) -> None:
        """Writes JSON, atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> CostModel:
        """Reads what `save` wrote; raises `InvalidRequest` for anything else."""
        try:
            made = cls(**json.loads(path.read_text()))
            made._check()
            return made
        except (OSError, ValueError, TypeError) as error:
            raise InvalidRequest(f"{path} is no cost profile ({error}); run `dominotree profile` again") from error

    def _check(self) -> None:
        """Raises `ValueError` or `TypeError` where fields are not as many positive numbers as they should be."""
        contexts, rows, depths = len(self.contexts), len(self.rows), len(self.depths)
        shapes = {
            "contexts": (contexts,),
            "rows": (rows,),
            "verify_ms": (contexts, rows),
            "stepped_ms": (contexts, rows),
            "depths": (depths,),
            "draft_ms": (contexts, depths),
        }
        shapes |= {"build_ms": (rows,), "rest_ms": ()}
        shapes |= {"verify_each_ms": (contexts,), "draft_each_ms": (contexts,)}
        for name, shape in shapes.items():
            values = np.array(getattr(self, name), dtype=np.float64)
            least = 1e-6 if name in ("verify_ms", "stepped_ms") else 0.0
            if values.shape != shape or not np.isfinite(values).all() or (values < least).any():
                raise ValueError(f"{name} holds something else than {list(shape)} positive numbers")
        if rows < 2 or not contexts or not depths:
            raise ValueError("too few rows, contexts or depths were measured")


def _interpolate(at: npt.NDArray[np.int64], knots: Sequence[int], values: Sequence[float]) -> Floats:
    inside: Floats = np.interp(at, knots, values)
    slope = (values[-1] - values[-2]) / (knots[-1] - knots[-2])
    return inside + np.maximum(at - knots[-1], 0) * slope


def _at_context(context: int, contexts: Sequence[int], curves: Floats) -> Floats:
    weight = float(np.interp(context, contexts, np.arange(len(contexts))))
    low = int(weight)
    high = min(low + 1, len(contexts) - 1)
    blended: Floats = curves[low] + (weight - low) * (curves[high] - curves[low])
    return blended


def fit_convex(rows: Sequence[int], ms: Sequence[float]) -> list[float]:
    """The monotone convex curve nearest to `ms` at `rows`, in least squares of relative errors, since small passes are
    the common ones: sums of hinges, by scipy's nnls.
    """
    from scipy.optimize import nnls

    n = np.array(rows, dtype=np.float64)
    hinges = np.maximum(n[:, None] - n[None, :-1], 0)
    sized = np.array(ms, dtype=np.float64)[:, None]
    weights, _ = nnls(np.column_stack([np.ones_like(n), hinges]) / sized, np.ones_like(n))
    fitted: Floats = weights[0] + hinges @ weights[1:]
    return [float(x) for x in fitted]


def fit_monotone(ms: Sequence[float]) -> list[float]:
    """The monotone curve nearest to `ms`, in least squares of relative errors."""
    from scipy.optimize import isotonic_regression

    values = np.array(ms, dtype=np.float64)
    return [float(x) for x in isotonic_regression(values, weights=values**-2).x]


def lower_hull(values: Sequence[float]) -> list[float]:
    """The largest convex curve nowhere above `values`, which stand at 0, 1, 2 ..."""
    corners: list[int] = []
    for at, value in enumerate(values):
        while len(corners) > 1:
            first, last = corners[-2:]
            if (values[last] - values[first]) * (at - first) < (value - values[first]) * (last - first):
                break
            corners.pop()
        corners.append(at)
    return [float(x) for x in np.interp(np.arange(len(values)), corners, [values[corner] for corner in corners])]


def profile_key(name: str, target: Target, drafter: Drafter) -> dict[str, Any]:
    """What a profile is valid for."""
    c = drafter.config
    return {
        "target": name,
        "layers": target.num_layers,
        "drafter": [c.num_hidden_layers, c.block_size, c.draft_length, c.gru_hidden_dim, c.scored_vocab_size],
        "dtype": target.precision,
        "device": str(target.device),
        "threads": torch.get_num_threads(),
        "sequences": SEQUENCES,
        "processor": torch.cuda.get_device_name() if target.device.type == "cuda" else cpu_name(),
    }


def profile_path(key: dict[str, Any]) -> Path:
    """Where the profile of a key is kept."""
    return cache_dir() / "profiles" / f"{_digest(key)}.json"


def calibration_path(key: dict[str, Any]) -> Path:
    """Where what was learned about a pair's probabilities is kept."""
    return cache_dir() / "calibrations" / f"{_digest(key)}.json"


def _digest(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


def find_profile(name: str, target: Target, drafter: Drafter) -> CostModel | None:
    """The kept profile of this pair on this machine, if there is one."""
    path = profile_path(profile_key(name, target, drafter))
    return CostModel.load(path) if path.exists() else None


def measure(
    name: str,
    target: Target,
    drafter: Drafter,
    *,
    contexts: Sequence[int] = CONTEXTS,
    rows: Sequence[int] = ROWS,
    repeats: int = REPEATS,
    tick: Callable[[], None] = lambda: None,
) -> CostModel:
    """Measures draft, build and verify: medians of `repeats`, each in a fresh random order so that drift is shared.

    `tick` is called after each of the `len(contexts) * (len(rows) + 1) * repeats` measurements.
    """
    contexts = [c for c in contexts if c + max(rows) + 1 <= target.max_positions] or [64]
    rng = random.Random(0)
    length = max(contexts) + max(rows) + 64
    cache, context_cache = target.new_cache(SEQUENCES, length), drafter.new_cache(SEQUENCES, length)
    tokens = [rng.randrange(target.vocab_size) for _ in range(max(contexts))]
    drawn = [rng.randrange(target.vocab_size) for _ in range(max(rows))]
    everyone, layers = list(range(SEQUENCES)), drafter.feature_layers
    for slot in everyone:
        for start in range(0, len(tokens), 256):
            part = tokens[start : start + 256]
            out = target.forward(cache, [Segment(slot, start, part)], feature_layers=layers, last_only=True)
            assert out.features is not None
            drafter.extend(context_cache, [slot], [len(part)], out.features)
    verify: dict[tuple[int, int], list[float]] = {(c, r): [] for c in contexts for r in rows}
    together: dict[int, list[tuple[float, float]]] = {c: [] for c in contexts}
    depths = [depth for depth in DEPTHS if depth < drafter.draft_length] + [drafter.draft_length]
    read: dict[int, list[float]] = {c: [] for c in contexts}
    draft: dict[tuple[int, int], list[float]] = {(c, d): [] for c in contexts for d in depths}
    build: dict[int, list[float]] = {r: [] for r in rows}
    rest: list[float] = []
    method = "dominotree" if drafter.head is not None else "ddtree"
    for repeat in range(repeats + 1):
        plan = [*(("verify", *each) for each in verify), *(("draft", *each) for each in draft)]
        plan += [("together", context, 0) for context in contexts]
        rng.shuffle(plan)
        for what, context, count in plan:
            context_cache.lengths[:] = [context] * SEQUENCES
            if what == "draft":
                _, draft_ms = _timed(partial(drafter.draft, context_cache, [0], tokens[:1], depths=count))
                if repeat:
                    draft[context, count].append(draft_ms)
                continue
            if what == "together":
                _, draft_ms = _timed(partial(drafter.draft, context_cache, everyone, tokens[:SEQUENCES]))
                batch = [Segment(slot, context, tokens[:1]) for slot in everyone]
                verified, verify_ms = _timed(partial(target.forward, cache, batch, feature_layers=layers, best=True))
                ones = [1] * SEQUENCES
                _, extend_ms = _timed(partial(drafter.extend, context_cache, everyone, ones, verified.features))
                if repeat:
                    together[context].append((draft_ms + extend_ms, verify_ms))
                    tick()
                continue
            made = drafter.draft(context_cache, [0], [tokens[0]])
            drafting = Drafting(method, count - 1)
            with torch.inference_mode():
                _, build_ms = _timed(partial(_build, drafting, drafter, made))
            parents = [rng.randrange(max(0, i - 3), i + 1) for i in range(count - 1)]
            segment = Segment(0, context, drawn[:count], parents)
            verified, verify_ms = _timed(partial(target.forward, cache, [segment], feature_layers=layers, best=True))
            cache.lengths[0] = context
            kept = list(range(0, count, 2))
            _, commit_ms = _timed(partial(cache.commit, 0, kept))
            _, extend_ms = _timed(partial(drafter.extend, context_cache, [0], [len(kept)], verified.features[kept]))
            if repeat:  # the first pass warms up
                verify[context, count].append(verify_ms)
                read[context].append(extend_ms)
                rest.append(commit_ms)
                build[count].append(build_ms)
                tick()
    measured = [[statistics.median(verify[c, r]) for r in rows] for c in contexts]
    fitted = [fit_convex(rows, curve) for curve in measured]
    drafted = [fit_monotone([statistics.median(draft[c, d]) for d in depths]) for c in contexts]
    draft_one = [[ms + statistics.median(read[c]) for ms in curve] for c, curve in zip(contexts, drafted, strict=True)]
    draft_all, verify_all = ([statistics.median(pair[i] for pair in together[c]) for c in contexts] for i in (0, 1))
    alone = [float(_interpolate(np.array([SEQUENCES]), rows, curve)[0]) for curve in fitted]
    return CostModel(
        key=profile_key(name, target, drafter),
        contexts=list(contexts),
        rows=list(rows),
        verify_ms=fitted,
        stepped_ms=[fit_monotone(curve) for curve in measured],
        depths=depths,
        draft_ms=draft_one,
        build_ms=fit_convex(rows, [statistics.median(build[r]) for r in rows]),
        rest_ms=statistics.median(rest),
        verify_each_ms=_of_each_further(verify_all, alone),
        draft_each_ms=_of_each_further(draft_all, [curve[-1] for curve in draft_one]),
        measured_ms=measured,
    )


def _of_each_further(together: Sequence[float], alone: Sequence[float]) -> list[float]:
    """What each sequence after the first adds, at least nothing."""
    return [max(0.0, all_of - one) / (SEQUENCES - 1) for all_of, one in zip(together, alone, strict=True)]


def _build(drafting: Drafting, drafter: Drafter, draft: Draft) -> Tree:
    return grow(drafting, drafter, draft, [drafter.draft_length]).single(0)


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, 1000 * (time.perf_counter() - start)
