"""Writing to an 8-bit KV cache and reading it back: every code, every edge of the formats."""

from __future__ import annotations

import pytest
import torch
from triton import language as tl

from tests.kv_formats import QUANTIZED, storage
from trace_audit.kernels import kv_cache, reference
from trace_audit.kernels.cached_heads import LARGEST, CachedHeads
from trace_audit.kernels.formats import decoded, rounded
from trace_audit.kernels.runtime import is_interpreted, triton

WRITERS = {"kernel": kv_cache.write_quantized, "reference": reference.write_quantized}
KV, WIDTH = 3, 24
MANTISSA = {torch.float8_e4m3fn: (3, -6), torch.float8_e5m2: (2, -14)}
"""Mantissa bits, and the exponent of the smallest normal number."""


def empty(name: str, device, blocks: int = 8, width: int = WIDTH) -> CachedHeads:
    """A cache whose untouched places can be told: no code 0, no scale 0."""
    dtype, scaled = storage(name)
    data = torch.full((blocks, 8, KV, width), 0x55, dtype=torch.uint8, device=device)
    scales = torch.full((blocks, 8, KV), 55.0, device=device)
    return CachedHeads(data=data.view(dtype), scales=scales if scaled else None)


def written(name: str, heads: torch.Tensor, writer: str = "reference") -> torch.Tensor:
    """What the cache gives back as float32 for heads [T, KV, D], T a multiple of 8."""
    cached = empty(name, heads.device, len(heads) // 8, heads.shape[2])
    slots = torch.arange(len(heads), device=heads.device)
    WRITERS[writer](heads, slots, cached)
    return cached.read(slots[: len(heads) // 8], torch.float32).flatten(0, 1)


def wide_range(device, num_tokens: int = 40) -> torch.Tensor:
    """Vectors of sizes from far below the formats' subnormals to beyond their largest."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-25, 20, (num_tokens, KV, 1), generator=generator)
    return (torch.randn(num_tokens, KV, WIDTH, generator=generator) * 2.0**exponents).to(device)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype == torch.float32:
        a, b = a.view(torch.int32), b.view(torch.int32)
    return torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", QUANTIZED)
def test_the_kernel_writes_the_bits_of_the_reference(name, dtype, device):
    heads = wide_range(device)
    heads[5, 1] = 0.0
    heads[6, 0, 3] = float("nan")
    heads[7, 2, 1] = float("inf")
    heads[8, 0, 0] = float("-inf")
    heads[9] = -0.0
    # As the model hands it over: a head's tokens are not next to each other.
    heads = heads.to(dtype).transpose(0, 1).contiguous().transpose(0, 1)
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(1))[: len(heads)].to(device)
    caches = {writer: empty(name, device) for writer in WRITERS}
    for writer, cached in caches.items():
        WRITERS[writer](heads, slots, cached)
        untouched = torch.ones(64, dtype=torch.bool, device=device)
        untouched[slots] = False
        assert (cached.raw.flatten(0, 1)[untouched] == 0x55).all()
    pairs = zip(caches["kernel"].tensors, caches["reference"].tensors, strict=True)
    assert all(same_bits(a, b) for a, b in pairs)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_every_number_of_the_format_comes_back_as_it_is(name, writer, device):
    dtype, _ = storage(name)
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    numbers = numbers[numbers.isfinite()]
    heads = numbers.repeat(8, KV, 1).to(device)
    assert same_bits(written(name, heads, writer), heads)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_halfway_between_two_numbers_the_even_one_is_stored(name, writer, device):
    dtype, _ = storage(name)
    numbers = torch.arange(128, dtype=torch.uint8).view(dtype).float()
    numbers = numbers[numbers.isfinite()]
    below, above = numbers[:-1], numbers[1:]
    even = torch.where(torch.arange(len(below)) % 2 == 0, below, above)
    heads = ((below + above) / 2).repeat(8, KV, 1).to(device)
    assert torch.equal(written(name, heads, writer)[0, 0].cpu(), even)
    just_above = torch.nextafter(heads, torch.tensor(float("inf"), device=device))
    assert torch.equal(written(name, just_above, writer)[0, 0].cpu(), above)


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_error_is_at_most_half_a_unit_in_the_last_place(name, device):
    dtype, scaled = storage(name)
    heads = wide_range(device)
    largest = LARGEST[dtype]
    scale = heads.abs().amax(-1, keepdim=True) / largest if scaled else torch.ones(1).to(device)
    x = (heads / scale).double().clamp(-largest, largest)
    error = (written(name, heads).double() / scale - x).abs()
    unit = torch.ones_like(x)
    if dtype != torch.int8:
        mantissa, smallest = MANTISSA[dtype]
        exponent = x.abs().clamp(min=2.0**smallest).log2().floor()
        unit = 2.0 ** (exponent - mantissa)
    # The scale and the quotient are rounded to float32 on the way.
    assert (error <= unit / 2 + x.abs() * 2.0**-22).all()
    assert (error > 0).any()


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_without_a_scale_finite_numbers_saturate(name, writer, device):
    largest = LARGEST[storage(name)[0]]
    heads = torch.tensor([largest, largest * 1.03, largest * 1.07, 1e30, 3e38]).to(device)
    heads = torch.cat([heads, -heads]).repeat(8, KV, 1)
    assert (written(name, heads, writer).abs() == largest).all()
    assert torch.equal(written(name, heads, writer).sign(), heads.sign())


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("name", ["fp8_per_token_head", "int8"])
def test_with_a_scale_each_head_keeps_its_largest_number(name, writer, device):
    heads = wide_range(device)
    largest = heads.abs().amax(-1)
    assert torch.allclose(written(name, heads, writer).abs().amax(-1), largest, rtol=1e-6, atol=0)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("name", QUANTIZED)
def test_zeros_stay_zeros(name, writer, device):
    heads = torch.zeros(8, KV, WIDTH, device=device)
    heads[0, 0, 1] = 2.0
    got = written(name, heads, writer)
    assert got[0, 0, 1] != 0
    got[0, 0, 1] = 0.0
    assert not got.any()


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("name", QUANTIZED)
def test_what_is_not_finite_comes_back_as_nan_and_stays_in_its_head(name, writer, value, device):
    heads = torch.ones(8, KV, WIDTH, device=device)
    heads[3, 1, 5] = float(value)
    got = written(name, heads, writer)
    nan = got.isnan()
    assert nan[3, 1, 5]
    _, scaled = storage(name)
    assert nan.sum() == (WIDTH if scaled else 1)
    assert nan[3, 1].sum() == nan.sum()
    assert (got[~nan] - 1).abs().max() < 1e-6


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_heads_bits_depend_on_nothing_but_its_own_vector(name, device):
    """So neither batch nor tensor parallelism can change what is stored of a given vector."""
    heads = wide_range(device)
    together = written(name, heads, "kernel")
    alone = torch.cat([written(name, heads[i : i + 8], "kernel") for i in range(0, 40, 8)])
    assert same_bits(together, alone)
    reversed_heads = written(name, heads.flip(0).flip(1), "kernel").flip(0).flip(1)
    assert same_bits(together, reversed_heads)


def test_int8_uses_127_steps_on_both_sides(device):
    heads = torch.linspace(-1, 1, 255).repeat(8, KV, 1).to(device)
    cached = empty("int8", device, 1, 255)
    kv_cache.write_quantized(heads, torch.arange(8, device=device), cached)
    assert cached.data[0, 0, 0].tolist() == list(range(-127, 128))


@triton.jit
def _decode_kernel(codes_ptr, out_ptr, FP8: tl.constexpr):
    lane = tl.arange(0, 256)
    tl.store(out_ptr + lane, decoded(tl.load(codes_ptr + lane), None, FP8))


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_kernels_decode_every_code_as_torch_does(name, device):
    dtype, _ = storage(name)
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    got = torch.empty(256, device=device)
    _decode_kernel[(1,)](codes, got, FP8=name.removeprefix("fp8_"))
    want = codes.view(dtype).float()
    assert torch.equal(got.isnan(), want.isnan())
    assert same_bits(got[~got.isnan()], want[~want.isnan()])


@triton.jit
def _round_kernel(values_ptr, out_ptr, num: tl.constexpr, INTERPRETED: tl.constexpr):
    lane = tl.arange(0, num)
    value = rounded(tl.load(values_ptr + lane), out_ptr.dtype.element_ty, INTERPRETED)
    tl.store(out_ptr + lane, value.to(out_ptr.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernels_round_to_nearest_even_as_torch_does(dtype, device):
    values = torch.randn(1024, generator=torch.Generator().manual_seed(0))
    values[::2] = (values[::2].to(dtype).float() + values[1::2].to(dtype).float()) / 2
    values[0], values[1], values[2] = float("nan"), float("inf"), float("-inf")
    values = values.to(device)
    got = torch.empty(1024, dtype=dtype, device=device)
    _round_kernel[(1,)](values, got, num=1024, INTERPRETED=is_interpreted())
    assert got[0].isnan()
    assert torch.equal(got[1:], values.to(dtype)[1:])
