"""What happens between the matmuls, row by row: through the C kernels on a CPU, through PyTorch elsewhere."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from dominotree import native


def _native(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16) and native.available()


def normalise(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of `x` `[..., dim]` over the last axis, times `weight` `[dim]` of the same dtype."""
    if not _native(x):
        return F.rms_norm(x, weight.shape, weight, eps)
    x = x.contiguous()
    out = torch.empty_like(x)
    dim = x.shape[-1]
    native.library().dt_add_norm(
        x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), x.dtype == torch.bfloat16,
        x.numel() // dim, dim, eps, torch.get_num_threads(),
    )  # fmt: skip
    return out


def add_normalise(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x + delta` and its RMS norm, all `[rows, dim]` of one dtype; `x` may be overwritten with the sum."""
    if not _native(x) or not x.is_contiguous():
        x = x + delta
        return x, normalise(x, weight, eps)
    out = torch.empty_like(x)
    native.library().dt_add_norm(
        x.data_ptr(), delta.data_ptr(), weight.data_ptr(), out.data_ptr(), x.dtype == torch.bfloat16,
        x.shape[0], x.shape[1], eps, torch.get_num_threads(),
    )  # fmt: skip
    return x, out


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` for `gate_up` `[rows, 2 * dim]`, gate first -> `[rows, dim]`."""
    if not _native(gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
    rows, dim = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, dim)
    native.library().dt_swiglu(
        gate_up.data_ptr(), out.data_ptr(), gate_up.dtype == torch.bfloat16, rows, dim, torch.get_num_threads()
    )
    return out


def argmax_rows(logits: torch.Tensor) -> list[int]:
    """The first place of the largest value in each row of `[rows, vocab]`; -1 where a row holds a NaN."""
    if not _native(logits):
        best, places = logits.max(dim=-1)
        return list(places.masked_fill(best.isnan(), -1).tolist())
    logits = logits.contiguous()
    places = torch.empty(logits.shape[0], dtype=torch.int64)
    native.library().dt_argmax(
        logits.data_ptr(), logits.dtype == torch.bfloat16, *logits.shape, places.data_ptr(), torch.get_num_threads()
    )
    return list(places.tolist())
