"""Drafting that knows the noise: the noise in a draft's logits is the one the target will draw with."""

from __future__ import annotations

import pytest
import torch

from dominotree.drafters.coupling import SHARPNESS, TRUST, Noise, couple
from dominotree.sampling import gumbel_noise
from lesser import FEWER, kernels_without

KNOWN = Noise(temperature=0.7, seed=11, position=23)


def noisy(base: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    drawn = gumbel_noise(KNOWN.seed, range(KNOWN.position, KNOWN.position + base.shape[0]), ids)
    return TRUST * (SHARPNESS * base.double() + KNOWN.temperature * drawn)


def check_coupling(vocab: int, dtype: torch.dtype) -> None:
    base = torch.randn(2, 3, vocab).mul_(4).to(dtype)
    chosen = torch.randperm(4 * vocab)[:vocab]
    for ids in (None, chosen, torch.arange(2 * vocab)[::2]):
        coupled, scale = couple(base, [None, KNOWN], None if ids is None else ids.expand(2, -1))
        assert coupled.dtype == torch.float32
        assert torch.equal(coupled[0], base[0].float())
        wanted = noisy(base[1], torch.arange(vocab) if ids is None else ids)
        assert torch.allclose(coupled[1].double(), wanted, rtol=1e-5, atol=1e-5)
        assert scale.tolist() == pytest.approx([1.0, TRUST * SHARPNESS])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("vocab", [1, 17, 512, 513, 20_000])
def test_a_draft_has_the_noise_of_the_draws_to_come(vocab: int, dtype: torch.dtype) -> None:
    check_coupling(vocab, dtype)


def test_without_kernels_the_noise_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dominotree.native.available", lambda: False)
    check_coupling(100, torch.bfloat16)


@pytest.mark.parametrize("left_out", FEWER)
def test_kernels_for_lesser_processors_have_the_same_noise(left_out: list[str]) -> None:
    with kernels_without(left_out):
        check_coupling(1003, torch.float32)


def test_logits_that_are_not_there_stay_so() -> None:
    base = torch.zeros(1, 2, 40)
    base[0, 1, 7:] = -torch.inf
    coupled, _ = couple(base, [KNOWN], None)
    assert coupled[0, 0].isfinite().all()
    assert coupled[0, 1, 7:].eq(-torch.inf).all()
    assert coupled[0, 1, :7].isfinite().all()
