"""The drafter's context, kept in the slots of vLLM's own KV cache blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dominotree.drafters.dflash import Draft, Drafter
from dominotree.drafters.words import ContextWords
from dominotree.targets.cache import SlotCache
from dominotree.targets.rows import Rows, Segment

_FIRST_SLOTS = 4096


def slots_of(blocks: torch.Tensor, block_size: int, length: int) -> torch.Tensor:
    """Slots, int64 `[length]`, of the first `length` positions of a sequence whose blocks are `blocks` in order."""
    position = torch.arange(length, device=blocks.device)
    return blocks[position // block_size].long() * block_size + position % block_size


class PagedContext:
    """Slot s holds the drafter's keys and values for the token whose own ones the target's cache has in slot s.

    Who owns a block so owns its context: prefix-cache hits bring it along, and preempted, aborted and finished
    requests need no care.
    """

    def __init__(self, drafter: Drafter, block_size: int, longest: int) -> None:
        """`longest` is the most positions that a sequence can have."""
        drafter.reach(longest + drafter.config.block_size)
        self._drafter, self._block_size = drafter, block_size
        c = drafter.config
        self._store = torch.empty(
            (0, 2, c.num_hidden_layers, c.num_key_value_heads, c.head_dim),
            dtype=drafter.new_cache(1, 1).keys.dtype,
            device=drafter.target.device,
        )  # [slots, keys and values, layers, kv_heads, head_dim]
        self._room: SlotCache | None = None

    def write(self, slots: torch.Tensor, positions: torch.Tensor, features: torch.Tensor) -> None:
        """Encodes features `[rows, len(feature_layers) * H]` at `positions` into `slots`, both int64 `[rows]`."""
        if len(slots) == 0:
            return
        self._grow(int(slots.max()) + 1)
        room, count = self._roomy(1, len(slots)), len(slots)
        self._drafter.encode(room, Rows.of([Segment(0, 0, [0] * count)], positions=positions.cpu().numpy()), features)
        made = torch.stack(
            [room.keys[:, 0, :, :count], room.values[:, 0, :, :count]]
        )  # [2, layers, kv_heads, rows, ..]
        self._store[slots] = made.permute(3, 0, 1, 2, 4)

    def move(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copies slots `source` to slots `to`, all read before any is written."""
        self._store[to] = self._store[source]

    def draft(
        self,
        blocks: Sequence[torch.Tensor],
        lengths: Sequence[int],
        roots: Sequence[int],
        texts: Sequence[ContextWords] = (),
    ) -> Draft:
        """A draft behind the first `lengths[i]` positions of sequence i, whose blocks are `blocks[i]` in order."""
        room = self._roomy(len(lengths), max(lengths))
        for row, length in enumerate(lengths):
            held = self._store[slots_of(blocks[row], self._block_size, length)].permute(1, 2, 3, 0, 4)
            room.keys[:, row, :, :length], room.values[:, row, :, :length] = held.unbind(0)
            room.lengths[row] = length
        return self._drafter.draft(room, range(len(lengths)), roots, texts=texts)

    def _roomy(self, sequences: int, length: int) -> SlotCache:
        """A cache for a batch, kept for the next ones."""
        held, block = self._room, self._drafter.config.block_size  # a cache has a block more than it was made for
        if held is None or len(held.lengths) < sequences or held.length < length + block:
            slots = max(sequences, len(held.lengths) if held is not None else 1)
            columns = max(length, held.length - block if held is not None else 1)
            held = self._room = self._drafter.new_cache(slots, 1 << (columns - 1).bit_length())
        return held

    def _grow(self, slots: int) -> None:
        if slots > len(self._store):
            grown = self._store.new_empty(max(_FIRST_SLOTS, 1 << (slots - 1).bit_length()), *self._store.shape[1:])
            grown[: len(self._store)] = self._store
            self._store = grown
