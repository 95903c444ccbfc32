"""Products of a few rows, with a norm before and an activation after, against float64."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.test_fused import DTYPES, random
from trace_audit.kernels.few_rows import Norm, few_rows_linear


def silu_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gate / (1 + (-gate).exp()) * up


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 576, 2560])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("normed", ["no", "first", "later"])
@pytest.mark.parametrize("gated", [True, False])
def test_the_product_and_what_stands_around_it(dtype, width, has_bias, normed, gated, device):
    x = random(2, width, dtype=dtype, device=device)
    weight = random(22, width, dtype=dtype, device=device, seed=1)
    bias = random(22, dtype=dtype, device=device, seed=2) if has_bias else None
    residual = random(2, width, dtype=dtype, device=device, seed=3) if normed == "later" else None
    scales = random(width, dtype=dtype, device=device, seed=4)
    norm = None if normed == "no" else Norm(residual, scales, 1e-5)
    got, total = few_rows_linear(x, weight, bias, norm=norm, gated=gated)

    want_total = x if residual is None else (x.float() + residual.float()).to(dtype)
    assert torch.equal(total, want_total)
    y = want_total.double()
    if norm is not None:
        y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scales.double()
    terms = y.abs() @ weight.double().abs().T
    y = y @ weight.double().T
    if bias is not None:
        y = y + bias.double()
    # float32 sums of `width` products, whose errors grow like its root at most a few times over.
    error = terms * 2.0**-24 * 8
    if gated:
        gate, up = y.chunk(2, dim=1)
        gate_error, up_error = error.chunk(2, dim=1)
        y = silu_gate(gate, up)
        # |silu'| is at most 1.1, and |silu(x)| at most |x|.
        error = 1.1 * gate_error * up.abs() + up_error * gate.abs() + y.abs() * 2.0**-20
    assert got.dtype == dtype
    assert got.shape == y.shape
    bound = error + y.abs() * torch.finfo(dtype).eps * 0.51 + torch.finfo(dtype).smallest_normal
    assert bool(((got.double() - y).abs() <= bound).all())


def test_a_row_has_the_bits_that_it_has_alone(device):
    x = random(2, 576, dtype=torch.float32, device=device)
    weight = random(30, 576, dtype=torch.float32, device=device, seed=1)
    both, _ = few_rows_linear(x, weight, None)
    for row in range(2):
        alone, _ = few_rows_linear(x[row : row + 1], weight, None)
        assert torch.equal(alone, both[row : row + 1])
