"""The kernels between a layer's products, against float64 and against their references."""

from __future__ import annotations

import pytest
import torch

from trace_audit.kernels import fused, reference
from trace_audit.kernels.cached_heads import CachedHeads, CacheTarget

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=["triton", "reference"])
def kernels(request: pytest.FixtureRequest):
    return fused if request.param == "triton" else reference


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def check(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Within one rounding of float64, and of the float32 sums before it."""
    assert got.dtype == dtype
    eps = torch.finfo(dtype).eps
    bound = want.abs() * max(0.5 * eps, 8e-7) * 1.01 + 4e-6 + torch.finfo(dtype).smallest_normal
    assert bool(((got.double() - want).abs() <= bound).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 64, 576])
@pytest.mark.parametrize("has_residual", [True, False])
def test_add_rms_norm(kernels, dtype, width, has_residual, device):
    hidden = random(5, width, dtype=dtype, device=device)
    residual = random(5, width, dtype=dtype, device=device, seed=1) if has_residual else None
    weight = random(width, dtype=dtype, device=device, seed=2)
    normalized, total = kernels.add_rms_norm(hidden, residual, weight, 1e-5)
    want = hidden if residual is None else (hidden.float() + residual.float()).to(dtype)
    assert torch.equal(total, want)
    x = want.double()
    x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    check(normalized, x, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 24, 128])
@pytest.mark.parametrize("norm", [True, False])
def test_norm_and_rotate(kernels, dtype, width, norm, device):
    num_heads, num_kv_heads = 6, 2
    heads = random(3, num_heads + 2 * num_kv_heads, width, dtype=dtype, device=device)
    angles = random(3, width // 2, dtype=torch.float32, device=device, seed=1).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    weights = [random(width, dtype=dtype, device=device, seed=s) for s in (2, 3)]
    before = heads.clone()
    query_weight, key_weight = weights if norm else (None, None)
    kernels.norm_and_rotate(heads, cos, sin, query_weight, key_weight, num_heads, 1e-6)
    assert torch.equal(heads[:, num_heads + num_kv_heads :], before[:, num_heads + num_kv_heads :])
    x = before[:, : num_heads + num_kv_heads].double()
    if norm:
        both = torch.cat([weights[0].expand(num_heads, -1), weights[1].expand(num_kv_heads, -1)])
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * both.double()
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    want = x * cos.double()[:, None] + turned * sin.double()[:, None]
    check(heads[:, : num_heads + num_kv_heads], want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [24, 1024, 1500])
def test_silu_and_multiply(kernels, dtype, width, device):
    gate_up = random(4, 2 * width, dtype=dtype, device=device) * 4
    gate, up = gate_up.double().chunk(2, dim=-1)
    check(kernels.silu_and_multiply(gate_up), gate / (1 + (-gate).exp()) * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_keys_and_values_are_written_where_they_go(kernels, dtype, stored, device):
    """The bits are those of a rotation and a write after it."""
    num_heads, num_kv_heads, width = 6, 2, 24
    heads = random(3, num_heads + 2 * num_kv_heads, width, dtype=dtype, device=device)
    angles = random(3, width // 2, dtype=torch.float32, device=device, seed=1).repeat(1, 2)
    turn = (angles.cos().to(dtype), angles.sin().to(dtype))
    slots = torch.tensor([5, 0, 30], device=device)
    shape = (4, 8, num_kv_heads, width)
    got, want = (
        [CachedHeads(data=torch.zeros(shape, dtype=stored, device=device)) for _ in range(2)]
        for _ in range(2)
    )
    apart = heads.clone()
    kernels.norm_and_rotate(apart, *turn, None, None, num_heads, 1e-6)
    key, value = apart[:, num_heads:].chunk(2, dim=1)
    reference.write_plain(key, value, slots, *want)
    target = CacheTarget(keys=got[0], values=got[1], slots=slots)
    kernels.norm_and_rotate(heads, *turn, None, None, num_heads, 1e-6, target=target)
    assert torch.equal(heads, apart)
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine.data, theirs.data)
