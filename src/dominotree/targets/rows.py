"""The rows of one forward pass, flattened over sequences, and what each of them may see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


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
        starts = np.zeros(len(tokens) + 1, dtype=np.int64)
        np.cumsum([len(path) for path in tails], out=starts[1:])
        return cls(
            segments=segments,
            tokens=np.array(tokens, dtype=np.int64),
            positions=np.array(at, dtype=np.int64) if positions is None else positions,
            slots=np.array(slots, dtype=np.int64),
            columns=np.array(columns, dtype=np.int64),
            contiguous=np.array(contiguous, dtype=np.int64),
            tail_start=starts,
            tail=np.array([column for path in tails for column in path] or [0], dtype=np.int64),
        )

    @classmethod
    def blocks(cls, slots: Sequence[int], starts: Sequence[int], size: int) -> Rows:
        """One block of `size` rows per slot behind its `start` columns; rows of a block see each other.

        The rows carry no tokens: a drafter makes its own.
        """
        count = len(slots) * size
        columns = np.add.outer(np.array(starts, dtype=np.int64), np.arange(size)).ravel()
        zeros = np.zeros(count + 1, dtype=np.int64)
        return cls(
            segments=[Segment(slot, start, [0] * size) for slot, start in zip(slots, starts, strict=True)],
            tokens=zeros[:count],
            positions=columns,
            slots=np.repeat(np.array(slots, dtype=np.int64), size),
            columns=columns,
            contiguous=np.repeat(np.array(starts, dtype=np.int64) + size, size),
            tail_start=zeros,
            tail=zeros[:1],
        )

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
