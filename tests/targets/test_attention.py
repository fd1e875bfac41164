"""The C kernel's attention: that of fp64 up to rounding, and a row's bits whatever shares the pass."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from dominotree import native
from dominotree.targets.attention import ExactAttention, NativeAttention
from dominotree.targets.cache import SlotCache
from dominotree.targets.config import rope_table
from dominotree.targets.rows import Rows, Segment
from lesser import FEWER, kernels_without

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no C kernels here: {native.reason()}")

HEADS, KV_HEADS, LENGTH = 6, 2, 160
TREE = [0, 0, 1, 1, 3, 2, 5, 7]  # parent rows of rows 1 .. 8
DTYPES = [torch.float32, torch.bfloat16]
DIMS = [8, 20, 32, 64, 96, 128, 160]


class Room:
    """A cache with something in it, the rope of its head size, and queries, keys and values for some rows."""

    def __init__(self, dim: int, dtype: torch.dtype, rows: int) -> None:
        generator = torch.Generator().manual_seed(dim)
        self.cache = SlotCache(2, 3, KV_HEADS, LENGTH, dim, dtype, torch.device("cpu"))
        self.cache.keys.normal_(generator=generator)
        self.cache.values.normal_(generator=generator)
        self.rope = rope_table({"rope_type": "default", "rope_theta": 1e4}, dim, LENGTH, torch.device("cpu"))
        self.qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * dim, generator=generator).to(dtype)

    def attend(self, kind: type, segments: Sequence[Segment], rows: Sequence[int] | None = None) -> torch.Tensor:
        """Layer 1 of a pass in which row i has the queries, keys and values `rows[i]`."""
        qkv = self.qkv if rows is None else self.qkv[list(rows)]
        out: torch.Tensor = kind(self.cache, Rows.of(segments), HEADS, *self.rope)(1, qkv.clone(), None)
        return out


def tree_at(start: int, slot: int = 1) -> Segment:
    return Segment(slot, start, [0] * (len(TREE) + 1), TREE)


def path_to(row: int) -> list[int]:
    rows = [row]
    while rows[-1]:
        rows.append(TREE[rows[-1] - 1])
    return rows[::-1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_it_is_fp64_attention_up_to_rounding(dim: int, dtype: torch.dtype) -> None:
    for start in (0, 1, 15, 16, 63, 100):
        segments = [Segment(0, start, [0] * 5), tree_at(start), Segment(2, start + 2, [0])]
        room = Room(dim, dtype, 5 + len(TREE) + 1 + 1)
        ours, exact = (room.attend(kind, segments) for kind in (NativeAttention, ExactAttention))
        error = 1e-5 if dtype == torch.float32 else 0.02
        torch.testing.assert_close(ours, exact, atol=error, rtol=error)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_a_row_has_its_bits_alone_in_a_tree_and_behind_committed_ancestors(dim: int, dtype: torch.dtype) -> None:
    for start in (0, 14, 47, 100):
        room = Room(dim, dtype, len(TREE) + 1)
        together = room.attend(NativeAttention, [tree_at(start)])
        for row in range(len(TREE) + 1):
            path = path_to(row)
            for at, above in enumerate(path):  # one after the other, as plain decoding would
                alone = room.attend(NativeAttention, [Segment(1, start + at, [0])], [above])
            assert torch.equal(alone[0], together[row]), (start, row)
            prefilled = room.attend(NativeAttention, [Segment(1, start, [0] * len(path))], path)
            assert torch.equal(prefilled[-1], together[row]), (start, row)


@pytest.mark.parametrize("left_out", FEWER)
def test_kernels_for_lesser_processors_compute_the_same(left_out: list[str]) -> None:
    with kernels_without(left_out):
        for dtype in DTYPES:
            for dim in (20, 64):
                test_it_is_fp64_attention_up_to_rounding(dim, dtype)
                test_a_row_has_its_bits_alone_in_a_tree_and_behind_committed_ancestors(dim, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_a_row_does_not_see_cannot_harm_it(dtype: torch.dtype, value: float) -> None:
    room = Room(64, dtype, len(TREE) + 1)
    whole = room.attend(NativeAttention, [tree_at(30)])
    room.qkv[8, -KV_HEADS * 64 :] = value
    spoilt = room.attend(NativeAttention, [tree_at(30)])
    assert not spoilt[8].isfinite().any()
    torch.testing.assert_close(spoilt[:8], whole[:8])
