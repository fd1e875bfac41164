"""The linear layer: equal to a plain matmul, and row by row the same bits whatever shares the pass."""

from __future__ import annotations

import os

import pytest
import torch

from dominotree import native
from dominotree.targets.linear import Linear, _weights
from lesser import FEWER, kernels_without

SHAPES = [(1, 1), (3, 5), (16, 32), (100, 48), (129, 200), (512, 96)]
ROWS = [1, 2, 3, 4, 5, 6, 7, 9, 17, 48, 49, 150]


def layer(out: int, width: int, dtype: torch.dtype, *, bias: bool, coarse: bool) -> tuple[Linear, torch.Tensor]:
    """A layer and, in fp64, its weight with the bias as a last column; `coarse` weights fit into bf16."""
    generator = torch.Generator().manual_seed(out * 1000 + width)
    weight = torch.randn(out, width, generator=generator)
    if coarse:
        weight = weight.bfloat16().float()
    weight = weight.to(dtype)
    b = torch.randn(out, generator=generator).to(dtype) if bias else None
    column = torch.zeros(out, 1) if b is None else b[:, None]
    return Linear(weight, b), torch.cat([weight.double(), column.double()], dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("coarse", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_a_plain_matmul_and_keeps_a_rows_bits(
    shape: tuple[int, int], bias: bool, coarse: bool, dtype: torch.dtype
) -> None:
    out, width = shape
    linear, weight = layer(out, width, dtype, bias=bias, coarse=coarse)
    x = torch.randn(max(ROWS), width, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = linear(x)
    assert whole.dtype == dtype
    exact = torch.cat([x.double(), torch.ones(len(x), 1)], dim=1) @ weight.T
    error = 1e-4 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(whole.double(), exact, atol=error * width**0.5, rtol=error)
    if linear.row_invariant:
        for rows in ROWS:
            assert torch.equal(linear(x[:rows]), whole[:rows]), rows
            assert torch.equal(linear(x[-rows:]), whole[-rows:]), rows


@pytest.mark.skipif(not native.available(), reason=f"no C kernels here: {native.reason()}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_weights_are_multiplied_as_they_were_rounded(
    shape: tuple[int, int], bias: bool, dtype: torch.dtype
) -> None:
    out, width = shape
    generator = torch.Generator().manual_seed(out)
    scale = 2.0 ** torch.randint(-6, 3, (out, 1), generator=generator)
    weight = torch.randint(-127, 128, (out, width), generator=generator) * scale
    weight[:, 0] = 127 * scale[:, 0]  # so that rounding keeps every one
    b = torch.randn(out, generator=generator).to(dtype) if bias else None
    linear = Linear(weight.to(dtype), b, int8=True)
    assert linear.nbytes < weight.numel() + 16 * 2 * width + 64
    x = torch.randn(max(ROWS), width, generator=generator).to(dtype)
    whole = linear(x)
    exact = x.double() @ weight.double().T + (0 if b is None else b.double())
    error = 1e-5 if dtype == torch.float32 else 0.01
    torch.testing.assert_close(whole.double(), exact, atol=error * 127 * width**0.5, rtol=error)
    for rows in ROWS:
        assert torch.equal(linear(x[:rows]), whole[:rows]), rows
        assert torch.equal(linear(x[-rows:]), whole[-rows:]), rows


@pytest.mark.skipif(not native.available(), reason=f"no C kernels here: {native.reason()}")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_weights_of_a_forked_process_are_its_own() -> None:
    Linear(torch.ones(4, 4))  # so that there is a chunk with room left
    child = os.fork()
    if not child:
        Linear(torch.full((64, 64), 7.0))
        os._exit(0)
    os.waitpid(child, 0)
    assert torch.equal(Linear(torch.eye(3, 64))(torch.ones(1, 64)), torch.ones(1, 3))
    assert _weights.zeros(64, torch.float32).eq(0).all()


@pytest.mark.skipif(not native.available(), reason=f"no C kernels here: {native.reason()}")
def test_rounding_to_int8_is_off_by_half_a_step_at_most() -> None:
    weight = torch.cat([torch.randn(33, 40), torch.zeros(1, 40), torch.full((1, 40), 1e-30)])
    found = Linear(weight, int8=True)(torch.eye(40)).T
    assert ((found - weight).abs() <= weight.abs().amax(dim=1, keepdim=True) / 254 * 1.001).all()
    assert found[33].eq(0).all()


def test_a_result_is_that_of_fp32_arithmetic_however_the_weights_are_kept() -> None:
    """Weights that bf16 holds are stored in it; the same ones with one more, which it does not hold, are not."""
    linear, _ = layer(64, 96, torch.float32, bias=False, coarse=True)
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(64 * 1000 + 96)).bfloat16().float()
    wide = Linear(torch.cat([weight, torch.full((1, 96), 1 / 3)]))
    x = torch.randn(5, 96)
    assert torch.equal(linear(x), wide(x)[:, :64])


def test_rows_that_are_not_contiguous_are_read_right() -> None:
    linear, weight = layer(20, 30, torch.float32, bias=False, coarse=True)
    x = torch.randn(30, 8).T
    torch.testing.assert_close(linear(x).double(), x.double() @ weight[:, :-1].T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_take_a_plain_matmul(dtype: torch.dtype) -> None:
    linear, weight = layer(20, 32, dtype, bias=True, coarse=True)
    x = torch.randn(4, 32).to(dtype)
    exact = torch.cat([x.double(), torch.ones(4, 1)], dim=1) @ weight.T
    torch.testing.assert_close(linear(x).double(), exact, atol=0.05, rtol=0.02)
    assert not linear.row_invariant


@pytest.mark.parametrize("left_out", FEWER)
def test_kernels_for_lesser_processors_compute_the_same(monkeypatch: pytest.MonkeyPatch, left_out: list[str]) -> None:
    monkeypatch.setattr("dominotree.targets.linear.onednn_works", lambda dtype: False)
    with kernels_without(left_out):
        for dtype in (torch.float32, torch.bfloat16):
            for shape in SHAPES:
                for coarse in (True, False):
                    test_equals_a_plain_matmul_and_keeps_a_rows_bits(shape, True, coarse, dtype)
                test_int8_weights_are_multiplied_as_they_were_rounded(shape, True, dtype)
