"""Estimates over grouped tokens: means, ratios, shares and quantiles with their intervals.

Tokens of one sequence share their drift, so the unit of every interval is the group, not the
token (docs/metrics.md, "Intervals").
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

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


class GroupedTokens:
    """Tokens with the group of each: turns per-token values into estimates."""

    def __init__(
        self, group: NDArray[np.int64], resampler: Resampler, *, design_effect: float = 1.0
    ) -> None:
        """Groups N tokens.

        Args:
            group: int64 [N], dense group index of each token in [0, resampler.num_groups).
            resampler: Shared group draws.
            design_effect: Used for shares without variance (no event at all); at least 1.
        """
        self._group = group
        self._resampler = resampler
        self._design_effect = design_effect

    def __len__(self) -> int:
        """Tokens, N."""
        return len(self._group)

    @cached_property
    def counts(self) -> FloatArray:
        """Tokens of each group: float64 [G]."""
        return self.sums(np.ones(len(self._group)))

    @cached_property
    def num_groups(self) -> int:
        """Groups with at least one token."""
        return int(np.count_nonzero(self.counts))

    def sums(self, values: FloatArray) -> FloatArray:
        """Per-group sums: float64 [N] -> float64 [G]."""
        groups = self._resampler.num_groups
        return np.bincount(self._group, weights=values, minlength=groups).astype(np.float64)

    def mean(self, values: FloatArray) -> Estimate:
        """Mean over tokens, a ratio of group sums (values float64 [N], N >= 1, finite)."""
        value = float(values.mean())
        if self.num_groups < 2:
            return Estimate(value=value)
        totals = self.sums(values)
        error = self._standard_error(totals, self.counts, value)
        return Estimate(
            value=value,
            interval=self._ratio_interval(totals, self.counts, value, error),
            effective_n=len(values) / self._effect(values, error),
            detectable=detectable_change(error, self.num_groups),
        )

    def ratio(self, numerator: FloatArray, denominator: FloatArray) -> Estimate:
        """Sum over sum, paired by group (float64 [N] each; the denominator's sum is positive)."""
        totals, sizes = self.sums(numerator), self.sums(denominator)
        value = float(totals.sum() / sizes.sum())
        if self.num_groups < 2:
            return Estimate(value=value)
        error = self._standard_error(totals, sizes, value)
        return Estimate(
            value=value,
            interval=self._ratio_interval(totals, sizes, value, error),
            detectable=detectable_change(error, self.num_groups),
        )

    def share(self, events: NDArray[np.bool_]) -> Estimate:
        """Share of tokens with an event; exact binomial rules when events (or misses) are few."""
        estimate = self.mean(events.astype(np.float64))
        count = int(events.sum())
        if estimate.effective_n is None:
            return estimate
        effective_n = estimate.effective_n
        if count in (0, len(events)):
            effective_n = len(events) / self._design_effect
        interval = clipped(estimate.interval, 0.0, 1.0)
        if min(count, len(events) - count) < FEW_EVENTS:
            interval = rare_share_interval(estimate.value, effective_n)
        return Estimate(
            value=estimate.value,
            interval=interval,
            effective_n=effective_n,
            detectable=estimate.detectable if count not in (0, len(events)) else None,
        )

    def bootstrap_ratio(self, numerator: FloatArray, denominator: FloatArray) -> Estimate:
        """Sum over sum, with a bootstrap interval whatever the number of groups."""
        totals = np.stack([self.sums(numerator), self.sums(denominator)], axis=1)
        value = float(totals[:, 0].sum() / totals[:, 1].sum())
        if self.num_groups < 2:
            return Estimate(value=value)
        return Estimate(value=value, interval=self._bootstrap_interval(totals))

    def quantiles(self, values: FloatArray, levels: tuple[float, ...]) -> list[Estimate]:
        """Quantiles of non-negative values (float64 [N]) with order-statistics intervals."""
        ordered = np.sort(values)
        points = np.quantile(ordered, levels)
        if self.num_groups < 2:
            return [Estimate(value=float(point)) for point in points]
        found = []
        for level, point in zip(levels, points.tolist(), strict=True):
            effect = self.design_effect((values > point).astype(np.float64))
            effective_n = len(values) / (effect or 1.0)
            bounds = quantile_interval(ordered, level, effective_n, self.num_groups)
            found.append(Estimate(value=point, interval=bounds, effective_n=effective_n))
        return found

    def design_effect(self, values: FloatArray) -> float | None:
        """Variance of the grouped mean over that of independent tokens, at least 1."""
        if self.num_groups < 2:
            return None
        error = self._standard_error(self.sums(values), self.counts, float(values.mean()))
        return self._effect(values, error)

    def _effect(self, values: FloatArray, error: float) -> float:
        independent = float(values.var()) / len(values)
        return max(1.0, error * error / independent) if independent > 0 else self._design_effect

    def _standard_error(self, totals: FloatArray, counts: FloatArray, ratio: float) -> float:
        """Of a ratio of sums, from the linearized residuals y_i - R n_i."""
        groups = self.num_groups
        residuals = totals - ratio * counts
        spread = float(residuals @ residuals) * groups / (groups - 1)
        return float(np.sqrt(spread) / counts.sum())

    def _ratio_interval(
        self, totals: FloatArray, counts: FloatArray, value: float, error: float
    ) -> Interval | None:
        if self.num_groups <= MAX_T_GROUPS:
            return t_interval(value, error, self.num_groups)
        return self._bootstrap_interval(np.stack([totals, counts], axis=1))

    def _bootstrap_interval(self, totals: FloatArray) -> Interval | None:
        sums = self._resampler.sums(totals)
        with np.errstate(divide="ignore", invalid="ignore"):
            return percentile_interval(sums[:, 0] / sums[:, 1])
