"""The few special functions that intervals need, in float64 and without scipy.

The incomplete beta function is the continued fraction of DLMF 8.17.22 in Lentz's form; the
quantiles invert it by bisection, which cannot diverge and is fast enough for a few calls.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_MAX_TERMS = 20_000
_TINY = 1e-300
_EPSILON = 1e-16
_CDF_IS_ZERO, _CDF_IS_ONE = -39.0, 9.0


def incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularized incomplete beta function I_x(a, b).

    Args:
        a: First shape, positive.
        b: Second shape, positive.
        x: In [0, 1].

    Raises:
        ValueError: An argument is out of its range.
    """
    if not (a > 0 and b > 0 and 0 <= x <= 1):
        raise ValueError(f"incomplete_beta needs a, b > 0 and x in [0, 1], got {a}, {b}, {x}")
    if x in (0.0, 1.0):
        return x
    # The fraction converges fast only below the mean; above it, use the mirror image.
    if x > (a + 1) / (a + b + 2):
        return 1.0 - _beta_below_mean(b, a, 1.0 - x)
    return _beta_below_mean(a, b, x)


def _beta_below_mean(a: float, b: float, x: float) -> float:
    log_front = (
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    return math.exp(log_front) / (a * _continued_fraction(a, b, x))


def _continued_fraction(a: float, b: float, x: float) -> float:
    value, c, d = 1.0, 1.0, 0.0
    for n in range(1, _MAX_TERMS):
        m = n // 2
        if n % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1.0 / _away_from_zero(1.0 + term * d)
        c = _away_from_zero(1.0 + term / c)
        value *= c * d
        if abs(c * d - 1.0) < _EPSILON:
            return value
    raise ArithmeticError(f"incomplete_beta({a}, {b}, {x}) did not converge")


def _away_from_zero(x: float) -> float:
    return x if abs(x) > _TINY else _TINY


def beta_quantile(q: float, a: float, b: float) -> float:
    """x with I_x(a, b) = q, for q in (0, 1)."""
    if not 0 < q < 1:
        raise ValueError(f"a quantile needs a probability in (0, 1), got {q}")
    low, high = 0.0, 1.0
    while True:
        # Geometric steps near zero keep the relative precision of a tiny quantile.
        mid = 0.5 * (low + high) if low > 0 or high > 1e-3 else high * 1e-3
        if mid in (low, high) or mid < _TINY:
            return mid
        if incomplete_beta(a, b, mid) < q:
            low = mid
        else:
            high = mid


@lru_cache(maxsize=512)
def t_quantile(q: float, degrees: float) -> float:
    """Quantile of Student's t distribution.

    Args:
        q: Probability in (0, 1).
        degrees: Degrees of freedom, positive.
    """
    if not (0 < q < 1 and degrees > 0):
        raise ValueError(f"t_quantile needs q in (0, 1) and degrees > 0, got {q}, {degrees}")
    if q == 0.5:
        return 0.0
    tail = 2.0 * min(q, 1.0 - q)
    # With B ~ Beta(degrees / 2, 1 / 2), P(|T| > t) = P(B < degrees / (degrees + t^2)). Near the
    # middle B is close to 1, so its complement is what must be found precisely.
    if tail > 0.5:
        complement = beta_quantile(1.0 - tail, 0.5, 0.5 * degrees)
        t = math.sqrt(degrees * complement / (1.0 - complement))
    else:
        x = beta_quantile(tail, 0.5 * degrees, 0.5)
        t = math.sqrt(degrees * (1.0 - x) / x)
    return math.copysign(t, q - 0.5)


def normal_cdf(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Standard normal distribution function, elementwise; exact tails through erfc.

    Args:
        x: float64 [N].
    """
    # 0 and 1 to the last bit beyond these.
    cdf = (x > _CDF_IS_ONE).astype(np.float64)
    inside = np.flatnonzero((x >= _CDF_IS_ZERO) & (x <= _CDF_IS_ONE))
    scaled = (x[inside] / -math.sqrt(2.0)).tolist()
    cdf[inside] = 0.5 * np.fromiter(map(math.erfc, scaled), dtype=np.float64, count=len(scaled))
    return cdf
