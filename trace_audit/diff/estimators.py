"""Estimates over grouped tokens: means, ratios, shares and quantiles with their intervals.

Tokens of one sequence share their drift, so the unit of every interval is the group, not the
token (docs/metrics.md, "Intervals").
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trace_audit.diff.bootstrap import Resampler
from trace_audit.diff.intervals import (
    clipped,
    detectable_change,
    percentile_interval,
    rare_share_interval,
    t_interval,
)
from trace_audit.diff.metric import Interval
from trace_audit.diff.moments import Elementwise, Moments
from trace_audit.diff.quantiles import quantile_interval

MAX_T_GROUPS = 100
FEW_EVENTS = 20

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A value, and what is known about its precision (see :class:`summary.Metric`)."""

    value: float
    interval: Interval | None = None
    effective_n: float | None = None
    detectable: float | None = None


class Estimator:
    """Turns moments of grouped tokens into estimates."""

    def __init__(self, resampler: Resampler, *, design_effect: float = 1.0) -> None:
        """Estimates from moments of ``resampler.num_groups`` groups.

        Args:
            resampler: Shared group draws.
            design_effect: Used for shares without variance (no event at all); at least 1.
        """
        self._resampler = resampler
        self._design_effect = design_effect

    def mean(self, tokens: Moments) -> Estimate:
        """Mean over at least one token, a ratio of group sums."""
        value = tokens.mean
        groups = num_groups(tokens)
        if groups < 2:
            return Estimate(value=value)
        error = _standard_error(tokens.totals, tokens.counts, value, groups)
        return Estimate(
            value=value,
            interval=self._ratio_interval(tokens.totals, tokens.counts, value, error, groups),
            effective_n=tokens.size / self.effect(tokens),
            detectable=detectable_change(error, groups),
        )

    def ratio(self, numerator: Moments, denominator: Moments) -> Estimate:
        """Sum over sum of the same tokens, paired by group; the denominator's sum is positive."""
        totals, sizes = numerator.totals, denominator.totals
        value = float(totals.sum() / sizes.sum())
        groups = num_groups(numerator)
        if groups < 2:
            return Estimate(value=value)
        error = _standard_error(totals, sizes, value, groups)
        return Estimate(
            value=value,
            interval=self._ratio_interval(totals, sizes, value, error, groups),
            detectable=detectable_change(error, groups),
        )

    def share(self, events: Moments) -> Estimate:
        """Share of tokens whose value is 1 and not 0; exact rules when events or misses are few."""
        estimate = self.mean(events)
        count = round(events.total)
        if estimate.effective_n is None:
            return estimate
        effective_n = estimate.effective_n
        if count in (0, events.size):
            effective_n = events.size / self._design_effect
        interval = clipped(estimate.interval, 0.0, 1.0)
        if min(count, events.size - count) < FEW_EVENTS:
            interval = rare_share_interval(estimate.value, effective_n)
        return Estimate(
            value=estimate.value,
            interval=interval,
            effective_n=effective_n,
            detectable=estimate.detectable if count not in (0, events.size) else None,
        )

    def bootstrap_ratio(self, numerator: Moments, denominator: Moments) -> Estimate:
        """Sum over sum, with a bootstrap interval whatever the number of groups."""
        totals = np.stack([numerator.totals, denominator.totals], axis=1)
        value = float(totals[:, 0].sum() / totals[:, 1].sum())
        if num_groups(numerator) < 2:
            return Estimate(value=value)
        return Estimate(value=value, interval=self._bootstrap_interval(totals))

    def effect(self, tokens: Moments) -> float:
        """Variance of the grouped mean over that of independent tokens, at least 1."""
        error = _standard_error(tokens.totals, tokens.counts, tokens.mean, num_groups(tokens))
        independent = tokens.variance / tokens.size
        return max(1.0, error * error / independent) if independent > 0 else self._design_effect

    def _ratio_interval(
        self,
        totals: FloatArray,
        counts: FloatArray,
        value: float,
        error: float,
        groups: int,
    ) -> Interval | None:
        if groups <= MAX_T_GROUPS:
            return t_interval(value, error, groups)
        return self._bootstrap_interval(np.stack([totals, counts], axis=1))

    def _bootstrap_interval(self, totals: FloatArray) -> Interval | None:
        sums = self._resampler.sums(totals)
        with np.errstate(divide="ignore", invalid="ignore"):
            return percentile_interval(sums[:, 0] / sums[:, 1])


class GroupedTokens:
    """Tokens with the group of each: turns per-token values into estimates."""

    def __init__(
        self, group: NDArray[np.integer], resampler: Resampler, *, design_effect: float = 1.0
    ) -> None:
        """Groups N tokens.

        Args:
            group: int [N], dense group index of each token in [0, resampler.num_groups).
            resampler: Shared group draws.
            design_effect: Used for shares without variance (no event at all); at least 1.
        """
        self._group = group
        self._num_groups = resampler.num_groups
        self._estimator = Estimator(resampler, design_effect=design_effect)

    def __len__(self) -> int:
        """Tokens, N."""
        return len(self._group)

    @cached_property
    def counts(self) -> FloatArray:
        """Tokens of each group: float64 [G]."""
        return np.bincount(self._group, minlength=self._num_groups).astype(np.float64)

    @cached_property
    def num_groups(self) -> int:
        """Groups with at least one token."""
        return int(np.count_nonzero(self.counts))

    def moments(self, values: NDArray[Any], of: Elementwise | None = None) -> Moments:
        """Of a finite value, or of an event, of each token: [N]; see :meth:`Moments.add`."""
        found = Moments(self._num_groups)
        found.add(values, self._group, of)
        return found

    def mean(self, values: NDArray[np.floating], of: Elementwise | None = None) -> Estimate:
        """Mean over tokens, a ratio of group sums (values float [N], N >= 1, finite)."""
        return self._estimator.mean(self.moments(values, of))

    def ratio(self, numerator: FloatArray, denominator: FloatArray) -> Estimate:
        """Sum over sum, paired by group (float64 [N] each; the denominator's sum is positive)."""
        return self._estimator.ratio(self.moments(numerator), self.moments(denominator))

    def share(self, events: NDArray[Any], of: Elementwise | None = None) -> Estimate:
        """Share of tokens with an event; exact binomial rules when events (or misses) are few."""
        return self._estimator.share(self.moments(events, of))

    def bootstrap_ratio(self, numerator: NDArray[Any], denominator: NDArray[Any]) -> Estimate:
        """Sum over sum, with a bootstrap interval whatever the number of groups."""
        return self._estimator.bootstrap_ratio(self.moments(numerator), self.moments(denominator))

    def abs_quantiles(self, values: FloatArray, levels: tuple[float, ...]) -> list[Estimate]:
        """Quantiles of the sizes of values (float64 [N]) with order-statistics intervals."""
        ordered = np.abs(values)
        ordered.sort()
        points = np.quantile(ordered, levels)
        if self.num_groups < 2:
            return [Estimate(value=float(point)) for point in points]
        found = []
        for level, point in zip(levels, points.tolist(), strict=True):
            above = self.moments(values, partial(_farther_than, point))
            effective_n = len(values) / self._estimator.effect(above)
            bounds = quantile_interval(ordered, level, effective_n, self.num_groups)
            found.append(Estimate(value=point, interval=bounds, effective_n=effective_n))
        return found


def num_groups(tokens: Moments) -> int:
    """Groups with at least one token."""
    return int(np.count_nonzero(tokens.counts))


def _farther_than(point: float, values: FloatArray) -> NDArray[np.bool_]:
    return np.abs(values) > point


def _standard_error(totals: FloatArray, counts: FloatArray, ratio: float, groups: int) -> float:
    """Of a ratio of sums, from the linearized residuals y_i - R n_i."""
    residuals = totals - ratio * counts
    spread = float(residuals @ residuals) * groups / (groups - 1)
    return float(np.sqrt(spread) / counts.sum())
