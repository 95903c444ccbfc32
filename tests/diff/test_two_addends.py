"""A sum of two half-precision numbers is the same number in float32, rounded once.

What the report holds two tensor-parallel ranks to, whatever their reduction is called.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

# Bits of precision, least and largest exponent of a normal number.
FORMATS = {torch.bfloat16: (8, -126, 127), torch.float16: (11, -14, 15)}
DTYPES = list(FORMATS)


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """All bit patterns but NaNs, [65536 - NaNs]."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return values[~values.isnan()]


def interesting(dtype: torch.dtype) -> torch.Tensor:
    """Zeros, infinities, the ends of the range, and neighbours of powers of two."""
    info = torch.finfo(dtype)
    tiny = torch.tensor([info.smallest_normal], dtype=torch.float64)
    powers = tiny * 2.0 ** torch.arange(0, 12, dtype=torch.float64)
    large = torch.tensor([info.max, info.max / 2, info.max * info.eps], dtype=torch.float64)
    one = 1 + info.eps * torch.arange(-4, 5, dtype=torch.float64)
    half_ulp = torch.tensor([info.eps / 2, info.eps / 4, 1.5 * info.eps], dtype=torch.float64)
    ends = torch.tensor([0.0, float("inf")], dtype=torch.float64)
    values = torch.cat([powers, tiny * info.eps, large, one, half_ulp, ends]).to(dtype)
    return torch.cat([values, -values])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, any NaN being as good as another."""
    nan = a.isnan() & b.isnan()
    return bool((nan | (a.view(torch.int16) == b.view(torch.int16))).all())


def summed(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Added in their own dtype, and in float32 rounded once."""
    return a + b, (a.float() + b.float()).to(a.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_value_plus_interesting_ones(dtype: torch.dtype) -> None:
    a = every_value(dtype)
    for b in interesting(dtype):
        assert same(*summed(a, b.expand_as(a))), b


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_pairs_and_their_order(dtype: torch.dtype) -> None:
    values = every_value(dtype)
    generator = torch.Generator().manual_seed(0)
    a, b = values[torch.randint(len(values), (2, 1_000_000), generator=generator)]
    assert same(*summed(a, b))
    assert same(a + b, b + a)


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_are_the_exact_sum_rounded_to_nearest_even(dtype: torch.dtype) -> None:
    values = every_value(dtype)
    values = torch.cat([values[values.isfinite()], interesting(dtype).repeat(60)])
    values = values[values.isfinite()]
    generator = torch.Generator().manual_seed(1)
    a, b = values[torch.randint(len(values), (2, 5000), generator=generator)]
    exact = [Fraction(x) + Fraction(y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    expected = torch.tensor([rounded(value, dtype) for value in exact], dtype=torch.float64)
    own, once = summed(a, b)
    assert own.double().equal(expected)
    assert once.double().equal(expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_overflow_is_the_same_infinity(dtype: torch.dtype) -> None:
    largest = torch.tensor([torch.finfo(dtype).max], dtype=dtype)
    own, once = summed(largest, largest)
    assert own.isinf().all()
    assert once.isinf().all()
    # The smallest addend that overflows is half a unit in the last place of the largest number.
    half_ulp = torch.tensor([2.0 ** (FORMATS[dtype][2] - FORMATS[dtype][0])], dtype=dtype)
    assert same(*summed(largest, half_ulp))
    assert (largest + half_ulp).isinf().all()
    below = torch.nextafter(half_ulp, torch.zeros_like(half_ulp))
    assert same(*summed(largest, below))
    assert (largest + below).equal(largest)


@pytest.mark.parametrize("dtype", DTYPES)
def test_three_addends_do_differ(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    one, half = torch.tensor([1.0], dtype=dtype), torch.tensor([eps / 2], dtype=dtype)
    own = one + half + half
    once = (one.float() + half.float() + half.float()).to(dtype)
    assert not same(own, once)


def rounded(value: Fraction, dtype: torch.dtype) -> float:
    """To the nearest number of the format, of two the even one; infinite past its range."""
    precision, least, largest = FORMATS[dtype]
    if value == 0:
        return 0.0
    size = abs(value)
    exponent = least
    while size >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (exponent - precision + 1)
    steps = round(size / unit)  # of two the even one
    sign = 1 if value > 0 else -1
    if steps * unit >= Fraction(2) ** (largest + 1):
        return sign * float("inf")
    return sign * float(steps * unit)
