"""The one linear layer that target and drafter are made of."""

from __future__ import annotations

from functools import cache

import torch
from torch.nn import functional as F


class Linear:
    """`x @ weight.T + bias` for `x` `[rows, in]`.

    On a CPU the weight is packed once for oneDNN, which reads it at the speed of memory and gives a row the same
    bits whatever rows share the pass (from two rows on; a single row is padded). Elsewhere it is a plain matmul.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.packed = weight.device.type == "cpu" and weight.dtype != torch.float16 and packing_works(weight.dtype)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, 16) if self.packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.packed:
            return F.linear(x, self.weight, self.bias)
        if x.shape[0] == 1:
            return self._pointwise(x.expand(2, -1).contiguous())[:1]
        return self._pointwise(x)

    def _pointwise(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out


@cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether this build has oneDNN's private packing operators and they compute what a plain matmul does."""
    try:
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
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
