"""Drafting that knows the noise: candidates ranked with the Gumbel noise that the target will use.

At temperature T the target takes the argmax of logit / T + g, which is that of logit + T * g, and g is known before the
target has run (it is keyed by seed, position and token). What is unknown is how far the drafter's logits are off.
Taking them as a fixed multiple of the target's plus an error that is Gumbel too, the chance that token i is the argmax
is softmax(trust * (sharpness * logit + T * g)): the less the drafter's logits say about the target's, the lower
`trust`. For chains this is known as Gumbel coupling. The output cannot change: the tree only proposes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dominotree import native
from dominotree.sampling import gumbel_noise, noise_start

# The likeliest values for a drafter of the default target, teacher-forced, at temperatures 0.5 and 1 alike.
SHARPNESS = 1.2
TRUST = 0.7


@dataclass(frozen=True)
class Noise:
    """What decides a sequence's next draws: temperature above 0, seed, and the absolute position of depth 0."""

    temperature: float
    seed: int
    position: int


def couple(
    base: torch.Tensor, noise: Sequence[Noise | None], token_ids: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Base logits with each sequence's noise in them, and the factor that corrections to them need.

    `base` `[batch, K, V']` of any float dtype, `token_ids` `[batch, V']` the target ids of its last axis (None:
    0 .. V'-1). Sequences without noise stay as they are. Returns fp32 `[batch, K, V']` and `[batch]`.
    """
    scale = torch.tensor([1.0 if known is None else TRUST * SHARPNESS for known in noise], device=base.device)
    fast = base.device.type == "cpu" and base.dtype in (torch.float32, torch.bfloat16) and native.available()
    base = base.contiguous() if fast else base.float()
    coupled = torch.empty(base.shape, dtype=torch.float32, device=base.device)
    for row, known in enumerate(noise):
        if known is None:
            coupled[row] = base[row]
        else:
            ids = None if token_ids is None else token_ids[row]
            (_couple_native if fast else _couple)(base[row], known, ids, out=coupled[row])
    return coupled, scale


def _couple(base: torch.Tensor, known: Noise, token_ids: torch.Tensor | None, *, out: torch.Tensor) -> None:
    depths, vocab = base.shape
    ids = torch.arange(vocab, device=base.device) if token_ids is None else token_ids
    drawn = gumbel_noise(known.seed, range(known.position, known.position + depths), ids)
    out.copy_(TRUST * SHARPNESS * base + TRUST * known.temperature * drawn.to(base.dtype))


def _couple_native(base: torch.Tensor, known: Noise, token_ids: torch.Tensor | None, *, out: torch.Tensor) -> None:
    depths, vocab = base.shape
    starts = (ctypes.c_uint64 * depths)(*(noise_start(known.seed, known.position + depth) for depth in range(depths)))
    ids = None if token_ids is None else token_ids.contiguous()
    native.library().dt_couple(
        base.data_ptr(), base.dtype == torch.bfloat16, depths, vocab, None if ids is None else ids.data_ptr(),
        starts, TRUST * SHARPNESS, TRUST * known.temperature, out.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip


def sample_candidates(base: torch.Tensor, width: int) -> torch.Tensor:
    """Base logits, fp32 `[batch, K, V']`, of `width` tokens a depth drawn from the draft distribution, none twice.

    All others become -inf; a width of 0 keeps all. The draws come from a generator of their own, keyed by the logits,
    so that torch's is left alone and a run can be repeated.
    """
    base, vocab = base.float(), base.shape[-1]
    if not 0 < width < vocab:
        return base
    ids = torch.arange(vocab, device=base.device)
    sums = base.double().nan_to_num(0.0, 0.0, 0.0).sum(dim=(1, 2))
    keys = [int(key) for key in sums.abs().mul(1e6).remainder(2**31).tolist()]
    drawn = torch.stack([gumbel_noise(key, range(base.shape[1]), ids) for key in keys])
    kept = (base + drawn.to(base.dtype)).topk(width, dim=-1).indices
    return torch.full_like(base, -torch.inf).scatter(-1, kept, base.gather(-1, kept))
