"""Keys and values of many sequences, each in its own slot, with room for a tree's tail."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

import torch

from dominotree import native

_BLOCK = 16


class SlotCache:
    """`keys` and `values` `[layers, slots, kv_heads, columns, head_dim]`, allocated once; `columns` is `length` rounded
    up, since kernels read them in whole blocks.

    Column c < lengths[slot] holds the committed token at position c; the columns behind hold the round's tail
    (root, then tree nodes), which the next round overwrites. `free` lists the slots not in use, lowest first, so
    that slots in use stay together.
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
        shape = (layers, slots, kv_heads, -(-length // _BLOCK) * _BLOCK, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = [0] * slots
        self.free = list(range(slots))

    def claim(self, slot: int, keep: int = 0) -> None:
        """Takes a free slot with its first `keep` columns left in it."""
        if not 0 <= keep <= self.lengths[slot]:
            raise ValueError(f"cannot keep {keep} of {self.lengths[slot]} columns")
        self.free.remove(slot)
        self.lengths[slot] = keep

    def release(self, slot: int) -> None:
        """Gives a slot back; its columns stay readable until it is claimed again."""
        if slot in self.free:
            raise ValueError(f"slot {slot} is already free")
        insort(self.free, slot)

    def clear(self, slot: int) -> None:
        """Forgets what a slot holds, broken values too: NaN passes through masks that only multiply by 0."""
        self.keys[:, slot] = 0
        self.values[:, slot] = 0
        self.lengths[slot] = 0

    def commit(self, slot: int, tail: Sequence[int]) -> None:
        """Appends the tail rows `tail` (offsets behind the committed columns, increasing) to what is committed."""
        start = self.lengths[slot]
        moved = [(start + i, start + offset) for i, offset in enumerate(tail) if i != offset]
        if moved:
            to, source = torch.tensor(list(zip(*moved, strict=True)), device=self.keys.device)
            for rows in (self.keys, self.values):
                self._move(rows[:, slot], to, source)
        self.lengths[slot] = start + len(tail)

    def _move(self, rows: torch.Tensor, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copies columns of one slot, `rows` `[layers, kv_heads, columns, head_dim]`."""
        if rows.device.type != "cpu" or not native.available():
            rows[:, :, to] = rows[:, :, source]
            return
        size = rows.element_size()
        layers, kv_heads, length, head_dim = rows.shape
        native.library().dt_move(
            rows.data_ptr(), layers, rows.stride(0) * size, kv_heads, length, head_dim * size,
            to.data_ptr(), source.data_ptr(), len(to),
        )  # fmt: skip
