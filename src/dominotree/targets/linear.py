"""The one linear layer that target and drafter are made of."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch.nn import functional as F

from dominotree import native
from dominotree.machine import cpu_has_bf16


class Linear:
    """`x @ weight.T + bias` for `x` `[rows, in]` of `dtype`, by default the weight's; the weight may be narrower.

    On a CPU the weight is packed once so that it is read at the speed of memory and a row gets the same bits whatever
    rows share the pass (`row_invariant`): for oneDNN where the processor multiplies bf16 itself and that is the dtype,
    for our C kernel otherwise. The kernel keeps weights in bf16 where that holds every one of them exactly, as it does
    those of any model published in bf16: the same fp32 results from half the memory. Elsewhere it is a plain matmul.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, dtype: torch.dtype | None = None
    ) -> None:
        dtype = dtype or weight.dtype
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.kernel: native.Linear | None = None
        """What the C kernels need of it; None where they do not compute it."""
        self._onednn = False
        if weight.device.type == "cpu" and dtype in (torch.float32, torch.bfloat16):
            if native.available() and (
                dtype == torch.float32 or native.multiplies_bf16() or not onednn_works(torch.bfloat16)
            ):
                self._pack(weight if weight.dtype == torch.bfloat16 else weight.to(dtype))
                return
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

    def _pack(self, weight: torch.Tensor) -> None:
        if weight.dtype != torch.bfloat16:
            narrow = weight.to(torch.bfloat16)
            weight = narrow if torch.equal(narrow.to(weight.dtype), weight) else weight
        weight = weight.contiguous()
        lanes = native.library().dt_lanes()
        inputs = self.in_features + (self.in_features % 2 if weight.dtype == torch.bfloat16 else 0)  # in pairs
        self._weight = weight.new_empty(-(-self.out_features // lanes) * lanes * inputs)
        self._bias = None if self.bias is None else self.bias.float().contiguous()
        bf16 = weight.dtype == torch.bfloat16
        native.library().dt_pack(weight.data_ptr(), bf16, self.out_features, self.in_features, self._weight.data_ptr())
        self.kernel = native.Linear(
            self.in_features, self.out_features, bf16, self._weight.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
        )  # fmt: skip
        self._call = native.library().dt_linear

    def _native(self, x: torch.Tensor, kernel: native.Linear) -> torch.Tensor:
        if x.shape[1] != self.in_features or x.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"rows of {x.shape[1]} {x.dtype} do not fit a layer of {self.in_features} inputs")
        x = x.contiguous()
        out = x.new_empty(x.shape[0], self.out_features)
        bf16 = x.dtype == torch.bfloat16
        failed = self._call(
            ctypes.byref(kernel), x.data_ptr(), out.data_ptr(), bf16, x.shape[0], torch.get_num_threads()
        )
        if failed:
            raise MemoryError("a linear layer ran out of memory")
        return out

    def _pointwise(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
        return out


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
