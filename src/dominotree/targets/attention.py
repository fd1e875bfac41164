"""Attention of a pass over the slot cache: rotate, store, attend. One interface, three ways to compute it.

* `NativeAttention`: our C kernel on a CPU. Sums run in the order of positions, so a row's result has the same bits
  whatever shares the pass and wherever its ancestors lie.
* `ExactAttention`: PyTorch in fp64, rounded once. The order of sums then matters only about once in 10^5 tokens.
* `TorchAttention`: PyTorch's fused attention. Fast, and equal up to rounding only.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch.nn import functional as F

from dominotree import native
from dominotree.targets.cache import SlotCache
from dominotree.targets.elementwise import normalise
from dominotree.targets.rows import Ints, Rows


@dataclass(frozen=True)
class LayerShape:
    """Sizes and biases of a layer."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    qk_norm: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False


class HeadNorms(NamedTuple):
    """RMS norms of each head's queries and keys, weights `[head_dim]`."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


class Attention(Protocol):
    """Attends for one pass; made anew for each pass."""

    def __call__(self, layer: int, qkv: torch.Tensor, norms: HeadNorms | None) -> torch.Tensor:
        """`qkv` `[rows, (heads + 2 kv_heads) * head_dim]` -> `[rows, heads * head_dim]`, keys and values stored.

        `norms` apply to every head's queries and keys before they are rotated; `qkv` may be overwritten.
        """
        ...

    def keep(self, layer: int, kv: torch.Tensor, norms: HeadNorms | None) -> None:
        """Stores keys and values only: `kv` `[rows, 2 * kv_heads * head_dim]`, rows contiguous; may overwrite it."""
        ...


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Half-split RoPE over the last axis; `cos` and `sin` `[..., head_dim / 2]` fp32 broadcast against `x`."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class NativeAttention:
    """The C kernel; needs CPU tensors in fp32 or bf16."""

    def __init__(self, cache: SlotCache, rows: Rows, heads: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self._library = native.library()
        _, _, self.kv_heads, length, head_dim = cache.keys.shape
        self._cache, self._rows, self.heads = cache, rows, heads
        self._tables = cos, sin  # kept while the pointers are in use
        self._threads = torch.get_num_threads()
        self._layer_bytes = cache.keys.stride(0) * cache.keys.element_size()
        self._args = native.Attention(
            heads=heads,
            kv_heads=self.kv_heads,
            head_dim=head_dim,
            length=length,
            scale=head_dim**-0.5,
            kv_bf16=int(cache.keys.dtype == torch.bfloat16),
            slot=_at(rows.slots),
            contiguous=_at(rows.contiguous),
            tail_start=_at(rows.tail_start),
            tail=_at(rows.tail),
        )
        self._store = native.RopeStore(
            rows=len(rows),
            heads=heads,
            kv_heads=self.kv_heads,
            head_dim=head_dim,
            length=length,
            kv_bf16=self._args.kv_bf16,
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            position=_at(rows.positions),
            slot=_at(rows.slots),
            column=_at(rows.columns),
        )

    def keep(self, layer: int, kv: torch.Tensor, norms: HeadNorms | None) -> None:
        store = self._store
        store.heads, store.q_out = 0, None
        store.keys = self._cache.keys.data_ptr() + layer * self._layer_bytes
        store.values = self._cache.values.data_ptr() + layer * self._layer_bytes
        store.qkv, store.stride, store.bf16 = kv.data_ptr(), kv.stride(0), int(kv.dtype == torch.bfloat16)
        if norms is not None:
            store.k_norm, store.eps = norms.key.data_ptr(), norms.eps
        self._library.dt_rope_store(ctypes.byref(store), self._threads)
        store.heads = self.heads

    def __call__(self, layer: int, qkv: torch.Tensor, norms: HeadNorms | None) -> torch.Tensor:
        args, store = self._args, self._store
        q = torch.empty(len(self._rows), self.heads * args.head_dim, dtype=qkv.dtype)
        out = torch.empty_like(q)
        store.keys = args.keys = self._cache.keys.data_ptr() + layer * self._layer_bytes
        store.values = args.values = self._cache.values.data_ptr() + layer * self._layer_bytes
        store.qkv, store.q_out, store.stride = qkv.data_ptr(), q.data_ptr(), qkv.shape[1]
        store.bf16 = args.q_bf16 = int(qkv.dtype == torch.bfloat16)
        if norms is not None:
            store.q_norm, store.k_norm, store.eps = norms.query.data_ptr(), norms.key.data_ptr(), norms.eps
        args.q, args.out = q.data_ptr(), out.data_ptr()
        self._library.dt_rope_store(ctypes.byref(store), self._threads)
        if self._library.dt_attend(ctypes.byref(args), len(self._rows), self._threads):
            raise MemoryError("attention ran out of memory")
        return out

    def encode(
        self,
        layers: ctypes.Array[native.Layer],
        features: torch.Tensor,
        fuse: native.Linear,
        norm: torch.Tensor,
        project: native.Linear,
        eps: float,
    ) -> None:
        """Stores the keys and values of all `layers` for `features` `[rows, width]`: fused, normed, projected."""
        store, cache = self._store, self._cache
        _check_rows(features, len(self._rows), fuse.in_features)
        both = torch.empty(len(features) * (fuse.out_features + project.out_features), dtype=features.dtype)
        behind = both.data_ptr() + len(features) * fuse.out_features * both.element_size()
        store.keys, store.values = cache.keys.data_ptr(), cache.values.data_ptr()
        store.bf16, store.eps = int(features.dtype == torch.bfloat16), eps
        failed = self._library.dt_encode(
            ctypes.byref(fuse), norm.data_ptr(), eps, ctypes.byref(project), ctypes.byref(layers), len(layers),
            features.data_ptr(), both.data_ptr(), behind, self._layer_bytes, ctypes.byref(store), self._threads,
        )  # fmt: skip
        if failed:
            raise MemoryError("a pass ran out of memory")

    def run(self, layers: ctypes.Array[native.Layer], shape: LayerShape, x: torch.Tensor, **ends: object) -> None:
        """Takes `x` `[rows, hidden]`, in place, through `layers` and on to the head; `ends` are the fields of
        `native.Pass` that say what is wanted of it.
        """
        rows, hidden = x.shape
        _check_rows(x, len(self._rows), shape.hidden)
        attended, kv, size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, x.element_size()
        widths = [hidden, hidden, attended + 2 * kv, 2 * shape.intermediate, shape.intermediate, attended, attended]
        places = list(accumulate((-(-rows * width * size // 64) * 64 for width in widths), initial=0))
        scratch = torch.empty(places[-1], dtype=torch.uint8)
        normed, delta, qkv, gate_up, active, q, out = (scratch.data_ptr() + place for place in places[:-1])
        bf16 = int(x.dtype == torch.bfloat16)
        args, store = self._args, self._store
        args.q, args.out, args.q_bf16 = q, out, bf16
        args.keys, args.values = self._cache.keys.data_ptr(), self._cache.values.data_ptr()
        store.qkv, store.q_out, store.stride, store.bf16, store.eps = qkv, q, attended + 2 * kv, bf16, shape.eps
        buffers = native.Pass(
            rows, hidden, shape.intermediate, self._layer_bytes, shape.eps, bf16,
            x.data_ptr(), normed, delta, qkv, gate_up, active, **ends,
        )  # fmt: skip
        failed = self._library.dt_layers(
            ctypes.byref(layers), len(layers), ctypes.byref(buffers), ctypes.byref(args), ctypes.byref(store),
            self._threads,
        )  # fmt: skip
        if failed:
            raise MemoryError("a pass ran out of memory")


def _check_rows(x: torch.Tensor, rows: int, width: int) -> None:
    """Kernels read what they are pointed at."""
    if x.shape != (rows, width) or x.dtype not in (torch.float32, torch.bfloat16) or not x.is_contiguous():
        raise ValueError(f"{list(x.shape)} {x.dtype} are no {rows} rows of {width} fp32 or bf16 values in a row")


def _at(values: Ints) -> int:
    """Address of an array, without the detour over `ctypes`."""
    address: int = values.__array_interface__["data"][0]
    return address


class TorchAttention:
    """PyTorch's scaled_dot_product_attention over the slots in use, padded to the longest sequence."""

    def __init__(self, cache: SlotCache, rows: Rows, heads: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
        device = cache.keys.device
        self.heads, self.kv_heads = heads, cache.keys.shape[2]
        self._cache = cache
        positions = torch.from_numpy(rows.positions).to(device)
        self._cos, self._sin = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
        self._slots = torch.from_numpy(rows.slots).to(device)
        self._columns = torch.from_numpy(rows.columns).to(device)
        self._first, self._last = int(rows.slots.min()), int(rows.slots.max())
        self._width = max(len(segment.tokens) for segment in rows.segments)
        self._length = int(rows.columns.max()) + 1
        self._rows = rows

    @cached_property
    def _places(self) -> tuple[torch.Tensor, torch.Tensor]:
        place, sequence = self._rows.places(self._first)
        return torch.from_numpy(sequence).to(self._cos.device), torch.from_numpy(place).to(self._cos.device)

    @cached_property
    def _mask(self) -> torch.Tensor:
        """`[slots, 1, width, length]`."""
        mask = self._rows.mask(self._first, self._last, self._width, self._length)
        return torch.from_numpy(mask).to(self._cos.device).unsqueeze(1)

    def keep(self, layer: int, kv: torch.Tensor, norms: HeadNorms | None) -> None:
        by_head = kv.view(len(kv), 2, self.kv_heads, -1)
        k = by_head[:, 0] if norms is None else normalise(by_head[:, 0], norms.key, norms.eps)
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._slots, :, self._columns] = rotate(k, self._cos, self._sin).to(keys.dtype)
        values[self._slots, :, self._columns] = by_head[:, 1].to(values.dtype)

    def __call__(self, layer: int, qkv: torch.Tensor, norms: HeadNorms | None) -> torch.Tensor:
        width = qkv.shape[1] // (self.heads + 2 * self.kv_heads)
        q, kv = qkv.split_with_sizes([self.heads * width, 2 * self.kv_heads * width], dim=1)
        self.keep(layer, kv, norms)
        q = q.view(len(q), self.heads, width)
        if norms is not None:
            q = normalise(q, norms.query, norms.eps)
        padded = q.new_zeros(self._last - self._first + 1, self._width, *q.shape[1:])
        padded[self._places] = rotate(q, self._cos, self._sin)
        used = slice(self._first, self._last + 1)
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        out = self._attend(padded.transpose(1, 2), keys[used, :, : self._length], values[used, :, : self._length])
        return out.transpose(1, 2)[self._places].flatten(1)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # [slots, heads, width, head_dim] x [slots, kv_heads, length, head_dim]; a cache may be wider than its model
        out: torch.Tensor = F.scaled_dot_product_attention(q.to(k.dtype), k, v, attn_mask=self._mask, enable_gqa=True)
        return out.to(q.dtype)


class ExactAttention(TorchAttention):
    """The same in fp64, rounded once at the end."""

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        slots, heads, width, head_dim = q.shape
        grouped = q.double().reshape(slots, self.kv_heads, -1, head_dim)
        scores = (grouped @ k.double().transpose(-1, -2)).view(slots, heads, width, -1) * head_dim**-0.5
        weights = scores.masked_fill(~self._mask, -torch.inf).softmax(dim=-1)
        out: torch.Tensor = weights.view(slots, self.kv_heads, -1, self._length) @ v.double()
        return out.view(slots, heads, width, head_dim).to(q.dtype)


def attention_kind(
    dtype: torch.dtype, device: torch.device, exact: bool | None = None
) -> type[NativeAttention] | type[ExactAttention] | type[TorchAttention]:
    """Which attention to use: see `DecoderTarget` for what `exact` means."""
    if exact is False:
        return TorchAttention
    if device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and native.available():
        return NativeAttention
    return ExactAttention if exact else TorchAttention
