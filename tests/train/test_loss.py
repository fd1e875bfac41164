"""The fused loss against the plain formula, value and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dominotree.train.loss import Labels, acceptance_weights, draft_loss, exponential_weights

BLOCKS, DEPTHS, HIDDEN, EMB, VOCAB, TOP = 70, 5, 12, 6, 40, 4


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Labels]:
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(BLOCKS, DEPTHS, HIDDEN, generator=g, requires_grad=True)
    inner = torch.randn(BLOCKS, DEPTHS, EMB, generator=g, requires_grad=True)
    last = torch.randn(VOCAB, EMB, generator=g, requires_grad=True)
    head = torch.randn(VOCAB, HIDDEN, generator=g)
    ids = torch.stack([torch.randperm(VOCAB, generator=g)[: TOP + 1] for _ in range(BLOCKS * DEPTHS)])
    ids[::3, -1] = ids[::3, 0]  # the true token is often among the target's likeliest
    probs = torch.softmax(torch.randn(BLOCKS * DEPTHS, TOP + 1, generator=g), dim=-1)
    usable = (torch.rand(BLOCKS, DEPTHS, generator=g) > 0.1).cumprod(1).bool()
    return (
        hidden,
        inner,
        last,
        head,
        Labels(ids.view(BLOCKS, DEPTHS, -1), probs.view(BLOCKS, DEPTHS, -1), usable),
    )


def plain(
    hidden: Tensor,
    inner: Tensor | None,
    last: Tensor | None,
    head: Tensor,
    labels: Labels,
    share: float,
    gamma: float,
) -> Tensor:
    wanted = torch.zeros(BLOCKS, DEPTHS, VOCAB).scatter_add_(2, labels.ids, labels.probs)
    base = hidden @ head.T
    losses = -(wanted * F.log_softmax(base, -1)).sum(-1)
    if inner is not None and last is not None:
        corrected = -(wanted * F.log_softmax(base + inner @ last.T, -1)).sum(-1)
        losses = share * losses + (1 - share) * corrected
    weights = torch.exp(-torch.arange(DEPTHS) / gamma) * labels.usable
    return (weights * losses).sum() / weights.sum()


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_domino_loss_and_gradients_are_the_formulas(share: float) -> None:
    hidden, inner, last, head, labels = inputs()
    found = draft_loss(hidden, inner, last, head, labels, base_share=share, weighting=exponential_weights(4.0)).total
    expected = plain(hidden, inner, last, head, labels, share, 4.0)
    torch.testing.assert_close(found, expected)
    wanted = torch.autograd.grad(expected, (hidden, inner, last))
    for mine, theirs in zip(torch.autograd.grad(3 * found, (hidden, inner, last)), wanted, strict=True):
        torch.testing.assert_close(mine, 3 * theirs, atol=1e-6, rtol=1e-4)


def test_dflash_loss_and_gradients_are_the_formulas() -> None:
    hidden, _, _, head, labels = inputs()
    found = draft_loss(hidden, None, None, head, labels, base_share=0.7, weighting=exponential_weights(2.0)).total
    expected = plain(hidden, None, None, head, labels, 0.0, 2.0)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, hidden), torch.autograd.grad(expected, hidden))


@pytest.mark.parametrize("weighting", [exponential_weights(4.0), acceptance_weights(0.5)])
def test_unusable_positions_have_no_effect(weighting: object) -> None:
    hidden, inner, last, head, labels = inputs()
    changed = hidden.detach().clone()
    changed[~labels.usable] += 5
    losses = [
        draft_loss(h, inner, last, head, labels, base_share=0.2, weighting=weighting).total  # type: ignore[arg-type]
        for h in (hidden, changed)
    ]
    assert losses[0].item() == losses[1].item()
    assert not torch.autograd.grad(losses[0], hidden)[0][~labels.usable].any()


def test_nothing_usable_gives_zero_and_no_nan() -> None:
    hidden, inner, last, head, labels = inputs()
    none = Labels(labels.ids, labels.probs, torch.zeros_like(labels.usable))
    loss = draft_loss(hidden, inner, last, head, none, base_share=0.2, weighting=exponential_weights(4.0)).total
    assert loss.item() == 0
    assert all(not grad.any() for grad in torch.autograd.grad(loss, (hidden, inner, last)))


def test_acceptance_weights_are_the_gradient_of_the_expected_length() -> None:
    q = torch.rand(6, 4, dtype=torch.float64).requires_grad_()
    length = torch.cumprod(q, dim=1).sum()
    (slope,) = torch.autograd.grad(length, q)
    weights = acceptance_weights(1.0)(q.detach(), torch.ones(6, 4, dtype=torch.bool))
    torch.testing.assert_close(weights, slope)


def test_acceptance_weights_stop_at_the_first_unusable_position() -> None:
    usable = torch.tensor([[True, True, False, False]])
    weights = acceptance_weights(0.5)(torch.full((1, 4), 0.25), usable)
    torch.testing.assert_close(weights, torch.tensor([[1.5, 0.5, 0.0, 0.0]]))
