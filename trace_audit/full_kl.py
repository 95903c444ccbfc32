"""Exact KL divergence from whole distributions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def full_kl(log_x: NDArray[np.float32], log_y: NDArray[np.float32]) -> NDArray[np.float64]:
    """KL(X || Y) over the whole vocabulary, row by row in float64.

    As sum x phi(ln x/y) with phi(d) = d + exp(-d) - 1, which is sum x ln(x/y) - x + y: no term is
    negative, so nothing cancels where the two are close.

    Args:
        log_x: float32 [n, V], natural-log probabilities.
        log_y: float32 [n, V].

    Returns:
        float64 [n] nats; infinite where Y gives zero to what X does not, NaN where either is NaN.
    """
    rows = zip(log_x, log_y, strict=True)
    return np.array([_row(x.astype(np.float64), y.astype(np.float64)) for x, y in rows])


def _row(log_x: NDArray[np.float64], log_y: NDArray[np.float64]) -> float:
    zero_x, zero_y = np.isneginf(log_x), np.isneginf(log_y)
    with np.errstate(invalid="ignore", over="ignore"):
        d = log_x - log_y
        terms = np.exp(log_x) * (d + np.expm1(-d))
    if zero_x.any() or zero_y.any():
        # The limits: y where x is zero, nothing where both are, infinity where only y is.
        terms[zero_x] = np.exp(log_y[zero_x])
        terms[zero_y & ~zero_x & ~np.isnan(log_x)] = np.inf
    return float(terms.sum())
