"""Keys and values of many sequences, each in its own slot, with room for a tree's tail."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dominotree.errors import InvalidRequest


class SlotCache:
    """`keys` and `values` `[layers, slots, kv_heads, length, head_dim]`, allocated once.

    Column c < lengths[slot] holds the committed token at position c; the columns behind hold the round's tail
    (root, then tree nodes), which the next round overwrites.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        kv_heads: int,
        length: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.length = length
        shape = (layers, slots, kv_heads, length, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = [0] * slots
        self._free = list(range(slots))

    def claim(self) -> int:
        """A free slot, emptied; the lowest, so that slots in use stay together."""
        if not self._free:
            raise InvalidRequest(f"all {len(self.lengths)} slots are in use; wait for a sequence to finish")
        slot = self._free.pop(0)
        self.lengths[slot] = 0
        return slot

    def release(self, slot: int) -> None:
        """Gives a slot back; its rows stay readable until it is claimed again."""
        if slot in self._free:
            raise ValueError(f"slot {slot} is already free")
        self._free = sorted([*self._free, slot])

    def truncate(self, slot: int, length: int) -> None:
        """Keeps the first `length` committed columns."""
        if not 0 <= length <= self.lengths[slot]:
            raise ValueError(f"cannot keep {length} of {self.lengths[slot]} columns")
        self.lengths[slot] = length

    def commit(self, slot: int, tail: Sequence[int]) -> None:
        """Appends the tail rows `tail` (offsets behind the committed columns, increasing) to what is committed."""
        start = self.lengths[slot]
        moved = [(start + i, start + offset) for i, offset in enumerate(tail) if i != offset]
        if moved:
            to, source = (torch.tensor(list(columns), device=self.keys.device) for columns in zip(*moved, strict=True))
            for rows in (self.keys, self.values):
                rows[:, slot, :, to] = rows[:, slot, :, source]
        self.lengths[slot] = start + len(tail)
