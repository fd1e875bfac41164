"""Sorting with the tie rules every builder shares: larger value first, then smaller index."""

import torch
from torch import Tensor

from dominotree import native
from dominotree.errors import NumericalError


def stable_topk(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of fp32 `values [..., N]` and their indices, both `[..., k]`; ties: smaller index first.

    Runs without a host sync and can be traced. `torch.topk` promises no order among equal values, so value
    and index are joined into one integer key, of which no two are equal.
    """
    bits = torch.where(values == 0, 0.0, values).view(torch.int32)  # -0.0 and 0.0 have to tie
    ascending = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    last_first = torch.arange(values.shape[-1], device=values.device).neg() + (2**32 - 1)
    indices = torch.topk((ascending << 32) + last_first, k, dim=-1).indices
    return values.gather(-1, indices), indices


def top_candidates(base: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The candidates of every depth: base logits fp32 and draft-vocabulary indices int64, both `[B, K, M]`.

    `base [B, K, V']` may have any float dtype; M is `width`, at most V', or V' where `width` is 0. Ordered by
    logit descending, then index ascending. On a CPU a depth without a finite largest logit raises
    `NumericalError`; elsewhere, and while tracing, nothing is checked, so that nothing waits for the device.
    """
    vocab = base.shape[-1]
    width = min(width, vocab) if width else vocab
    if base.device.type != "cpu" or torch.compiler.is_compiling():
        return stable_topk(base.float(), width)
    if width < vocab and base.dtype in (torch.float32, torch.bfloat16) and native.available():
        return _native_topk(base, width)
    if width == vocab:
        logits, ids = torch.sort(base.float(), dim=-1, descending=True, stable=True)
    else:
        logits, ids = stable_topk(base.float(), width)
    check_finite(logits[..., 0])
    return logits, ids


def check_finite(values: Tensor) -> None:
    """Raise `NumericalError` where a value is NaN or infinite, on a CPU and outside a trace only."""
    if values.device.type != "cpu" or torch.compiler.is_compiling():
        return
    if not bool(torch.isfinite(values).all()):
        raise broken()


def broken() -> NumericalError:
    """The error for values that are not finite."""
    return NumericalError("the drafter produced NaN or infinite values; its weights or its target are broken")


def _native_topk(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`stable_topk` of fp32 or bf16 by a C kernel; raises where a row holds a NaN or has no finite largest value."""
    rows = values.contiguous()
    best = torch.empty(*values.shape[:-1], k, dtype=torch.float32)
    ids = torch.empty(best.shape, dtype=torch.int64)
    width = rows.shape[-1]
    wrong = native.library().dt_top(
        rows.data_ptr(), rows.dtype == torch.bfloat16, rows.numel() // width, width, k, best.data_ptr(), ids.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    if wrong:
        raise broken()
    return best, ids
