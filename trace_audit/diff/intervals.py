"""Interval rules that do not depend on how the tokens were grouped: t, Clopper-Pearson."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from trace_audit.diff.special import beta_quantile, t_quantile
from trace_audit.diff.summary import Interval

CONFIDENCE = 0.95
POWER = 0.8
_UPPER = 0.5 + CONFIDENCE / 2


def t_interval(value: float, standard_error: float, groups: int) -> Interval:
    """Interval with ``groups - 1`` degrees of freedom; needs at least two groups."""
    half = t_quantile(_UPPER, groups - 1) * standard_error
    return Interval(low=value - half, high=value + half, method="t")


def percentile_interval(draws: NDArray[np.float64]) -> Interval | None:
    """Percentile bootstrap interval; None if no draw is finite (every denominator was zero)."""
    finite = draws[np.isfinite(draws)]
    if not len(finite):
        return None
    low, high = np.quantile(finite, [1 - _UPPER, _UPPER])
    return Interval(low=float(low), high=float(high), method="bootstrap")


def detectable_change(standard_error: float, groups: int) -> float:
    """Smallest true change that a two-sided 5 % test would see with 80 % power."""
    degrees = groups - 1
    return (t_quantile(_UPPER, degrees) + t_quantile(POWER, degrees)) * standard_error


def rare_share_interval(share: float, effective_n: float) -> Interval:
    """Interval of a share with few events, on the effective number of tokens.

    Clopper-Pearson with ``share * effective_n`` (not necessarily whole) events. With no event the
    upper bound is 3 / effective_n, the rule of three: an interval is never [0, 0].

    Args:
        share: Observed share in [0, 1].
        effective_n: Tokens over the design effect, positive.
    """
    if share == 0.0:
        return Interval(low=0.0, high=min(1.0, 3.0 / effective_n), method="rule of three")
    if share == 1.0:
        return Interval(low=max(0.0, 1.0 - 3.0 / effective_n), high=1.0, method="rule of three")
    events = share * effective_n
    misses = effective_n - events
    low = beta_quantile(1 - _UPPER, events, misses + 1)
    high = beta_quantile(_UPPER, events + 1, misses)
    return Interval(low=low, high=high, method="clopper-pearson")


def clipped(interval: Interval | None, low: float, high: float = math.inf) -> Interval | None:
    """The interval inside the values its metric can take."""
    if interval is None:
        return None
    return Interval(
        low=min(max(interval.low, low), high),
        high=min(max(interval.high, low), high),
        method=interval.method,
    )
