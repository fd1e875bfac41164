"""The drafting loss, with the softmax over the draft vocabulary taken a few rows at a time.

Its gradients are found in the same pass: the logits of a whole batch never exist together, and each is read
while it is still in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["DraftLoss", "Labels", "Weighting", "acceptance_weights", "draft_loss", "exponential_weights"]

Weighting = Callable[[Tensor, Tensor], Tensor]
"""(probability of the true token, usable) `[blocks, depths]` -> weights of the same shape, zero where not
usable.
"""

_ROWS = 256


def exponential_weights(gamma: float) -> Weighting:
    """exp(-depth / gamma), as in DFlash (arXiv 2602.06036)."""

    def weigh(probability: Tensor, usable: Tensor) -> Tensor:
        depths = torch.arange(usable.shape[1], device=usable.device)
        return torch.exp(-depths / gamma) * usable

    return weigh


def acceptance_weights(alpha: float) -> Weighting:
    """How much the expected accepted length gains from each depth (the idea of D-PACE).

    With q the probability of the true token, a chain's expected length is sum_d prod_{i<=d} q_i; its
    derivative by log q_i is sum_{d>=i} prod_{j<=d} q_j. `alpha` below 1 softens q, so that deep positions are
    not starved early on.
    """

    def weigh(probability: Tensor, usable: Tensor) -> Tensor:
        reach = torch.cumprod(probability.clamp_min(1e-4) ** alpha * usable, dim=1)
        # without the position's own q: an unlikely token must not lower its own weight
        gain = reach.flip(1).cumsum(1).flip(1) / (probability.clamp_min(1e-4) ** alpha)
        return gain * usable

    return weigh


@dataclass(frozen=True)
class Labels:
    """What each draft depth should say; first two dimensions `[blocks, depths]`.

    `ids` int64 and `probs` float32 `[.., k]`: the wanted distribution over draft ids, sparse, summing to 1;
    the true token is the last entry of `ids`. `usable` bool: False from the end of the answer, or from the
    first token outside the draft vocabulary, on.
    """

    ids: Tensor
    probs: Tensor
    usable: Tensor


@dataclass(frozen=True)
class DraftLoss:
    """`total` is differentiable; the rest are figures for the log.

    `corrected` and `base` are weighted means of -log p(true token), 0-dim; `base` is 0 where its loss has no
    share.
    """

    total: Tensor
    corrected: Tensor
    base: Tensor


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        inner: Tensor | None,
        last: Tensor | None,
        head: Tensor,
        labels: Labels,
        base_share: float,
        weighting: Weighting,
    ) -> tuple[Tensor, Tensor, Tensor]:
        blocks, depths, size = hidden.shape
        dtype = head.dtype
        flat = hidden.reshape(-1, size).to(dtype)
        flat_inner = None if inner is None else inner.reshape(blocks * depths, -1).to(dtype)
        narrow = None if last is None else last.to(dtype)
        d_hidden = torch.empty_like(flat)
        d_inner = None if flat_inner is None else torch.empty_like(flat_inner)
        d_last = None if last is None else torch.zeros_like(last, dtype=torch.float32)
        sums = torch.zeros(4, device=hidden.device)  # weight, loss, corrected nll, base nll
        step = max(1, _ROWS // depths)
        for first in range(0, blocks, step):
            part = slice(first, min(first + step, blocks))
            rows = slice(part.start * depths, part.stop * depths)
            ids, probs = labels.ids[part].flatten(0, 1), labels.probs[part].flatten(0, 1)
            usable = labels.usable[part]
            base_logits = flat[rows] @ head.T
            if flat_inner is None or narrow is None:
                logits, base = base_logits, None
            else:
                base = torch.softmax(base_logits, dim=-1) if base_share > 0 else None
                logits = base_logits.addmm_(flat_inner[rows], narrow.T)
            p = torch.softmax(logits, dim=-1)
            listed = p.gather(1, ids).float()
            weights = weighting(listed[:, -1].view(usable.shape), usable).flatten()
            nll = -(probs * listed.clamp_min(1e-30).log()).sum(1)
            sums[0] += weights.sum()
            sums[2] += (weights * -listed[:, -1].clamp_min(1e-30).log()).sum()
            if base is None:
                base_nll, share = nll, 0.0
            else:
                base_listed, share = base.gather(1, ids).float(), base_share
                base_nll = -(probs * base_listed.clamp_min(1e-30).log()).sum(1)
                sums[3] += (weights * -base_listed[:, -1].clamp_min(1e-30).log()).sum()
            sums[1] += (weights * ((1 - share) * nll + share * base_nll)).sum()
            grad = _residual(p, ids, probs, weights * (1 - share))
            if flat_inner is not None and narrow is not None and d_inner is not None and d_last is not None:
                d_inner[rows] = grad @ narrow
                d_last += (grad.T @ flat_inner[rows]).float()
                if base is not None:
                    grad += _residual(base, ids, probs, weights * share)
            d_hidden[rows] = grad @ head
        scale = 1 / sums[0].clamp_min(1e-6)
        ctx.save_for_backward(
            (d_hidden * scale).view(blocks, depths, size).to(hidden.dtype),
            None if d_inner is None or inner is None else (d_inner * scale).view_as(inner).to(inner.dtype),
            None if d_last is None else d_last * scale,
        )
        return sums[1] * scale, sums[2] * scale, sums[3] * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = [None if saved is None else saved * grads[0].to(saved.dtype) for saved in ctx.saved_tensors]
        return (*found, None, None, None, None)


def _residual(p: Tensor, ids: Tensor, probs: Tensor, weights: Tensor) -> Tensor:
    """weights * (p - wanted), in place of `p` `[rows, vocab]`."""
    p.mul_(weights[:, None])
    return p.scatter_add_(1, ids, (-probs * weights[:, None]).to(p.dtype))


def draft_loss(
    hidden: Tensor,
    inner: Tensor | None,
    last: Tensor | None,
    head: Tensor,
    labels: Labels,
    *,
    base_share: float,
    weighting: Weighting,
) -> DraftLoss:
    """(1 - base_share) * CE(corrected) + base_share * CE(base), weighted mean over usable positions (Domino).

    `hidden` `[blocks, depths, hidden]`; `inner` `[blocks, depths, emb]` from `DrafterModel.correction` and
    `last` `[draft_vocab, emb]`, both None for plain DFlash; `head` `[draft_vocab, hidden]` frozen, whose
    dtype is that of the arithmetic. Zero, without gradient, where nothing is usable.
    """
    total, corrected, base = _Fused.apply(  # type: ignore[no-untyped-call]
        hidden, inner, last, head, labels, base_share, weighting
    )
    return DraftLoss(total, corrected.detach(), base.detach())
