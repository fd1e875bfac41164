"""The one linear layer that target and drafter are made of."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache

import torch
from torch.nn import functional as F

from dominotree import native
from dominotree.machine import cpu_has_bf16

_KEPT = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""What the kernel calls the types of weights."""


class Linear:
    """`x @ weight.T + bias` for `x` `[rows, in]` of `dtype`, by default the weight's; the weight may be narrower.

    On a CPU the weight is packed once so that it is read at the speed of memory and a row gets the same bits whatever
    rows share the pass (`row_invariant`): for oneDNN where the processor multiplies bf16 itself and that is the dtype,
    for our C kernel otherwise. The kernel keeps weights in bf16 where that holds every one of them exactly, as it does
    those of any model published in bf16: the same fp32 results from half the memory. With `int8` it rounds them
    to that, with a scale for each output. Elsewhere it is a plain matmul, of weights that are not rounded.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        int8: bool = False,
    ) -> None:
        dtype = dtype or weight.dtype
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.kernel: native.Linear | None = None
        """What the C kernels need of it; None where they do not compute it."""
        self._onednn = False
        if kernels_serve(dtype, weight.device):
            self._pack(weight if weight.dtype == torch.bfloat16 else weight.to(dtype), int8)
            return
        if weight.device.type == "cpu" and dtype in (torch.float32, torch.bfloat16):
            self._onednn = onednn_works(dtype)
        weight = weight.to(dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, 16) if self._onednn else weight

    @property
    def row_invariant(self) -> bool:
        """Whether a row's result has the same bits whatever rows share the pass."""
        return self._onednn or self.kernel is not None

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a pass reads."""
        return self._weight.numel() * self._weight.element_size()

    @property
    def least_rows(self) -> int:
        """Rows from which on a pass needs no padding to be row-invariant."""
        return 1 if self.kernel is not None else 2

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.kernel is not None:
            return self._native(x, self.kernel)
        if not self._onednn:
            return F.linear(x, self._weight, self.bias)
        if x.shape[0] == 1:  # oneDNN treats a single row differently
            return self._pointwise(x.expand(2, -1).contiguous())[:1]
        return self._pointwise(x)

    def _pack(self, weight: torch.Tensor, int8: bool) -> None:
        self._scale: torch.Tensor | None = None
        if int8:
            weight, self._scale = _rounded(weight)
        elif weight.dtype != torch.bfloat16:
            narrow = weight.to(torch.bfloat16)
            weight = narrow if torch.equal(narrow.to(weight.dtype), weight) else weight
        weight = weight.contiguous()
        self._weight = _weights.zeros(_panel_values(self.out_features, self.in_features, weight.dtype), weight.dtype)
        self._bias = None if self.bias is None else self.bias.float().contiguous()
        kept = _KEPT[weight.dtype]
        native.library().dt_pack(
            weight.data_ptr(), kept, 0, self.out_features, self.in_features, self._weight.data_ptr()
        )
        self.kernel = native.Linear(
            self.in_features, self.out_features, kept, self._weight.data_ptr(),
            *(None if values is None else values.data_ptr() for values in (self._bias, self._scale)),
        )  # fmt: skip
        self._call = native.library().dt_linear

    def _native(self, x: torch.Tensor, kernel: native.Linear) -> torch.Tensor:
        if x.shape[1] != self.in_features or x.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"rows of {x.shape[1]} {x.dtype} do not fit a layer of {self.in_features} inputs")
        x = x.contiguous()
        out = x.new_empty(x.shape[0], self.out_features)
        bf16 = x.dtype == torch.bfloat16
        failed = self._call(
            ctypes.byref(kernel), x.data_ptr(), out.data_ptr(), bf16, *out.shape, torch.get_num_threads()
        )
        if failed:
            raise MemoryError("a linear layer ran out of memory")
        return out

    def _pointwise(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
        return out


class GrowingLinear:
    """A linear layer without bias whose output features are put in place one by one; the kernel gives the same bits as
    a `Linear` that has them, one whose weights are not rounded to int8.
    """

    def __init__(
        self, most: int, in_features: int, weight_dtype: torch.dtype, dtype: torch.dtype, device: torch.device
    ) -> None:
        """For up to `most` outputs, weights that come in `weight_dtype`, and `x` of `dtype`."""
        self._kernel: native.Linear | None = None
        if kernels_serve(dtype, device):
            self._dtype = torch.bfloat16 if torch.bfloat16 in (weight_dtype, dtype) else torch.float32
            self._weight = torch.zeros(_panel_values(most, in_features, self._dtype), dtype=self._dtype)
            kept = _KEPT[self._dtype]
            self._kernel = native.Linear(in_features, most, kept, self._weight.data_ptr(), None, None)
        else:
            self._dtype = dtype
            self._weight = torch.zeros(most, in_features, dtype=dtype, device=device)

    def put(self, places: Sequence[int], weight: torch.Tensor) -> None:
        """Sets the weights of some outputs, `[len(places), in_features]`."""
        weight = weight.to(self._dtype).contiguous()
        if self._kernel is None:
            self._weight[list(places)] = weight
            return
        _, inputs = weight.shape
        for place, row in zip(places, weight, strict=True):
            native.library().dt_pack(row.data_ptr(), self._kernel.kept, place, 1, inputs, self._weight.data_ptr())

    def fill(self, x: torch.Tensor, out: torch.Tensor, first: int, count: int) -> None:
        """Writes what the first `count` outputs are for `x` `[rows, in_features]` to columns `first` and on of `out`
        `[rows, columns]`, both contiguous and of one dtype.
        """
        if self._kernel is None:
            out[:, first : first + count] = F.linear(x, self._weight[:count])
            return
        self._kernel.out_features = count
        failed = native.library().dt_linear(
            ctypes.byref(self._kernel), x.data_ptr(), out.data_ptr() + first * out.element_size(),
            x.dtype == torch.bfloat16, *out.shape, torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise MemoryError("a linear layer ran out of memory")


def _rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`weight` `[out, in]` as int8, and the scales `[out]`, fp32, that give it back."""
    rounded, scales = torch.empty(weight.shape, dtype=torch.int8), []
    for first in range(0, len(weight), 4096):  # a large head in fp32 would take several times its own memory
        wide = weight[first : first + 4096].float()
        scale = wide.abs().amax(dim=1) / 127
        rounded[first : first + 4096] = (wide / scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round()
        scales.append(scale)
    return rounded, torch.cat(scales)


def kernels_serve(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether our C kernel multiplies rows of `dtype`."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16) or not native.available():
        return False
    return dtype == torch.float32 or native.multiplies_bf16() or not onednn_works(torch.bfloat16)


def _panel_values(out_features: int, in_features: int, dtype: torch.dtype) -> int:
    """How many values weights take in the kernel's order."""
    lanes: int = native.library().dt_lanes()
    inputs = in_features + (0 if dtype == torch.float32 else in_features % 2)  # in pairs
    return -(-out_features // lanes) * lanes * inputs


class _Arena:
    """Zeroed memory for weights in large pages, where the system has them: a pass reads all of it, and a processor
    remembers the places of few small pages.
    """

    CHUNK = 2**25

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk, self._used = torch.empty(0, dtype=torch.uint8), 0

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """`[count]`; what is handed out together is given back together."""
        size = -(-count * dtype.itemsize // 64) * 64
        if size > self.CHUNK:
            return _in_large_pages(size)[: count * dtype.itemsize].view(dtype)
        with self._lock:
            if self._used + size > len(self._chunk):
                self._chunk, self._used = _in_large_pages(self.CHUNK), 0
            piece = self._chunk[self._used : self._used + count * dtype.itemsize]
            self._used += size
        return piece.view(dtype)


def _in_large_pages(size: int) -> torch.Tensor:
    own = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, size, **own)  # shared memory has no large pages, and a fork would go on sharing it
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


_weights = _Arena()


@cache
def onednn_works(dtype: torch.dtype) -> bool:
    """Whether this build has oneDNN's private packing operators and they compute what a plain matmul does.

    For bf16 also whether the processor multiplies it: oneDNN emulates it slowly.
    """
    try:
        if dtype == torch.bfloat16 and not (cpu_has_bf16() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
            return False
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(48, 32, generator=generator).to(dtype)
        x, bias = torch.randn(5, 32, generator=generator).to(dtype), torch.randn(48, generator=generator).to(dtype)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
        out = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return bool(
            torch.allclose(out.double(), F.linear(x.double(), weight.double(), bias.double()), atol=0.1, rtol=0.02)
        )
    except (AttributeError, RuntimeError):
        return False
