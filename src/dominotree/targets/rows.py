"""The rows of one forward pass, flattened over sequences, and what each of them may see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def _arrays(*columns: Sequence[int]) -> list[Ints]:
    """Integers as arrays, made in one go: a pass makes several small ones."""
    flat = np.array([value for column in columns for value in column], dtype=np.int64)
    ends = accumulate(map(len, columns))
    return [flat[end - len(column) : end] for column, end in zip(columns, ends, strict=True)]


@dataclass(frozen=True)
class Segment:
    """Consecutive rows of one sequence: a stretch of prompt, or a root with its tree.

    `tokens[i]` is written to column `start + i`. Without `parents` row i follows row i-1. With `parents`
    (`parents[i]` is the index of row i+1's parent *row*, 0 being the root's) the rows form a tree below row 0,
    parents before children.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    parents: Sequence[int] | None = None


@dataclass
class Rows:
    """All rows of a pass. Row r sees columns 0 .. contiguous[r]-1 and tail[tail_start[r]:tail_start[r+1]].

    Both lists are in the order of positions, so a row's sums run in the order they would have if its
    ancestors had been committed already. The row itself is among what it sees.
    """

    segments: Sequence[Segment]
    tokens: Ints
    positions: Ints
    slots: Ints
    columns: Ints
    contiguous: Ints
    tail_start: Ints
    tail: Ints

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def of(cls, segments: Sequence[Segment], *, least: int = 1, positions: Ints | None = None) -> Rows:
        """Flattens segments; with `least` 2 a pass of a single row gets it twice, for kernels that treat one row
        differently. `positions` are the rows' where they do not follow from their columns.
        """
        tokens: list[int] = []
        at: list[int] = []
        slots: list[int] = []
        columns: list[int] = []
        contiguous: list[int] = []
        tails: list[list[int]] = []
        if least > 1 and len(segments) == 1 and len(segments[0].tokens) == 1:
            segments = [segments[0], segments[0]]
        for segment in segments:
            count, start = len(segment.tokens), segment.start
            tokens += segment.tokens
            slots += [segment.slot] * count
            columns += range(start, start + count)
            if segment.parents is None:
                at += range(start, start + count)
                contiguous += range(start + 1, start + count + 1)
                tails += [[]] * count
                continue
            paths: list[list[int]] = [[]]
            for row, parent in enumerate(segment.parents, start=1):
                paths.append([*paths[parent], start + row])
            at += [start + len(path) for path in paths]
            contiguous += [start + 1] * count
            tails += paths
        starts = list(accumulate(map(len, tails), initial=0))
        tail = [column for path in tails for column in path] or [0]
        made = _arrays(tokens, at, slots, columns, contiguous, starts, tail)
        if positions is not None:
            made[1] = positions
        return cls(segments, *made)

    @classmethod
    def blocks(cls, slots: Sequence[int], starts: Sequence[int], size: int) -> Rows:
        """One block of `size` rows per slot behind its `start` columns; rows of a block see each other.

        The rows carry no tokens: a drafter makes its own.
        """
        zeros = [0] * size
        segments = [Segment(slot, start, zeros) for slot, start in zip(slots, starts, strict=True)]
        columns = [start + i for start in starts for i in range(size)]
        slot_of_row = [slot for slot in slots for _ in zeros]
        seen = [start + size for start in starts for _ in zeros]
        none = [0] * (len(columns) + 1)
        where, of, contiguous, tail_start, tail = _arrays(columns, slot_of_row, seen, none, [0])
        return cls(segments, tail_start[1:], where, of, where, contiguous, tail_start, tail)

    def mask(self, first_slot: int, last_slot: int, width: int, length: int) -> npt.NDArray[np.bool_]:
        """Dense `[slots, width, length]` mask for slots first .. last; rows that hold nothing see column 0."""
        mask = np.zeros((last_slot - first_slot + 1, width, length), dtype=np.bool_)
        mask[:, :, 0] = True
        place, sequence = self.places(first_slot)
        seen = np.arange(length) < self.contiguous[:, None]
        row = np.repeat(np.arange(len(self)), np.diff(self.tail_start))
        seen[row, self.tail[: len(row)]] = True
        mask[sequence, place] = seen
        return mask

    def places(self, first_slot: int) -> tuple[Ints, Ints]:
        """For each row its index within its sequence's rows, and its sequence's index counted from `first_slot`."""
        place = np.concatenate([np.arange(len(s.tokens)) for s in self.segments])
        return place, self.slots - first_slot
