"""How many sequences would decide what these leave open."""

from __future__ import annotations

import math

from trace_audit.diff.intervals import CONFIDENCE, rare_share_interval
from trace_audit.diff.metric import Interval
from trace_audit.diff.special import t_quantile

_MOST_GROUPS = 100_000_000
_UPPER = 0.5 + CONFIDENCE / 2


def groups_to_decide(
    value: float, interval: Interval, threshold: float, groups: int, effective_n: float | None
) -> int | None:
    """Fewest groups like these whose interval leaves the threshold out, if the value stays.

    Args:
        value: Point value.
        interval: 95 % interval that holds the threshold.
        threshold: In the metric's unit.
        groups: Groups that the interval came from, at least 2.
        effective_n: Of a share's binomial interval.

    Returns:
        None if no number would: the value is the threshold.
    """

    def decided(number: int) -> bool:
        if interval.method in ("clopper-pearson", "rule of three"):
            assert effective_n is not None
            bounds = rare_share_interval(value, effective_n * number / groups)
            return bounds.high <= threshold or bounds.low > threshold
        half = threshold_side(value, interval, threshold)
        return half * _shrink(interval, groups, number) <= abs(threshold - value)

    if not decided(_MOST_GROUPS):
        return None
    low, high = groups, _MOST_GROUPS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if decided(middle) else (middle, high)
    return high


def threshold_side(value: float, interval: Interval, threshold: float) -> float:
    """Half-width of the interval on the threshold's side."""
    return interval.high - value if threshold >= value else value - interval.low


def _shrink(interval: Interval, groups: int, number: int) -> float:
    """Factor on the half-width when there are ``number`` groups instead of ``groups``."""
    shrink = math.sqrt(groups / number)
    if interval.method == "t":
        shrink *= t_quantile(_UPPER, number - 1) / t_quantile(_UPPER, groups - 1)
    return shrink
