"""Changes of the best token: flips, hard flips, and ties that merely fell the other way."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trace_audit.diff.align import AlignedPair
from trace_audit.diff.columns import FloatArray, IntArray
from trace_audit.diff.special import normal_cdf
from trace_audit.diff.top_tokens import TopTokens

_MAD_TO_SIGMA = 1.4826
# Rows whose expectation is computed at once: they stay in a core's cache.
CHUNK = 1 << 16


@dataclass(frozen=True, kw_only=True)
class TopChanges(TopTokens):
    """What became of the best token at each of N positions.

    Attributes:
        gap_floor: p99 of |gap_B - gap_A| between repeats of one run, nats; 0 without repeats.
    """

    gap_floor: float = 0.0

    @property
    def ulp(self) -> FloatArray | None:
        """Unit of the coarser of the two runs: float64 [N]; None where neither is known."""
        return self._ulp_of(slice(None)) if self._ulps else None

    @property
    def gap_change(self) -> FloatArray:
        """|gap_B - gap_A| where both are known: float64 [<= N]."""
        with np.errstate(invalid="ignore"):  # one id alone is left by a filter on both sides
            change = self.candidate_gap - self.gap
        np.abs(change, out=change)
        known = np.isfinite(change) & self.known
        return change if known.all() else change[known]

    @property
    def scale(self) -> FloatArray | None:
        """s = max(1.4826 median |gap_B - gap_A|, u / 2) of each position: float64 [N]."""
        if not self._ulps or self.scatter is None:
            return None
        return _scale(self.scatter, self._ulp_of(slice(None)))

    @property
    def threshold(self) -> FloatArray | None:
        """tau = max(3 s, 2 u, gap_floor) of each position: float64 [N]."""
        if not self._ulps or self.scatter is None:
            return None
        return self._threshold_of(slice(None), self.scatter)

    @property
    def median_scale(self) -> float | None:
        """Median of :attr:`scale` over the positions that have one."""
        if not self._ulps or self.scatter is None:
            return None
        return float(np.mean(_scale(self.scatter, self._middle_ulps)))

    @property
    def median_threshold(self) -> float | None:
        """Median of :attr:`threshold` over the positions that have one."""
        if not self._ulps or self.scatter is None:
            return None
        return float(np.mean(self._threshold(self.scatter, self._middle_ulps)))

    @cached_property
    def hard(self) -> NDArray[np.bool_] | None:
        """Flips whose baseline gap is over the threshold: bool [N]."""
        if not self._ulps or self.scatter is None:
            return None
        hard = self.flip.copy()
        rows = np.flatnonzero(hard)
        hard[rows] = self.gap[rows] > self._threshold_of(rows, self.scatter)
        return hard

    @property
    def near_tie(self) -> NDArray[np.bool_] | None:
        """Positions whose baseline gap is not over the threshold: bool [N]."""
        if not self._ulps or self.scatter is None:
            return None
        near = self.known.copy()
        for start in range(0, len(near), CHUNK):
            rows = slice(start, start + CHUNK)
            near[rows] &= self.gap[rows] <= self._threshold_of(rows, self.scatter)
        return near

    @cached_property
    def expected(self) -> FloatArray | None:
        """Probability that noise flips each position: float64 [N]; None where it is not known.

        With x ~ N(gap, sigma^2) the gap before the candidate's logits are rounded, a strict flip
        is left after rounding with probability min(1, max(0, -x) / u_B): rounding alone never
        turns an order round, it only makes ties. Rounding two logits adds u_B^2 / 6 to the variance
        of the gap, which is taken off the observed one.
        """
        if self.why_no_expected is not None or self.candidate_ulp is None or self.scatter is None:
            return None
        # Zero where the gap is zero: a change there is a tie change, not a flip.
        expected = np.zeros(len(self.gap))
        for start in range(0, len(self.gap), CHUNK):
            rows = slice(start, start + CHUNK)
            # No noise flips an infinite gap: a filter left one id.
            gap = self.gap[rows]
            counted = start + np.flatnonzero(self.known[rows] & (gap > 0) & np.isfinite(gap))
            unit = self.candidate_ulp[counted].astype(np.float64)
            expected[counted] = _rounded_flips(self.gap[counted], self.scatter, unit)
        return expected

    @property
    def _ulps(self) -> list[NDArray[np.floating]]:
        """Units of the runs that have them."""
        return [ulp for ulp in (self.baseline_ulp, self.candidate_ulp) if ulp is not None]

    def _ulp_of(self, rows: slice | IntArray) -> FloatArray:
        """Coarser unit of some rows, of which one is known."""
        ulp: FloatArray = np.fmax(self._ulps[0][rows], self._ulps[-1][rows], dtype=np.float64)
        return ulp

    @cached_property
    def _middle_ulps(self) -> FloatArray:
        """Middle values of the coarser unit; what grows with it has its median there."""
        return _middle(np.fmax(self._ulps[0], self._ulps[-1]))

    def _threshold_of(self, rows: slice | IntArray, scatter: float) -> FloatArray:
        return self._threshold(scatter, self._ulp_of(rows))

    def _threshold(self, scatter: float, ulp: FloatArray) -> FloatArray:
        wide: FloatArray = np.maximum(3 * _scale(scatter, ulp), 2 * ulp)
        return np.maximum(wide, self.gap_floor)

    @cached_property
    def scatter(self) -> float | None:
        """1.4826 median |gap_B - gap_A|, nats; None where no gap is known in both runs."""
        change = self.gap_change
        return (
            _MAD_TO_SIGMA * float(np.median(change, overwrite_input=True)) if len(change) else None
        )

    @cached_property
    def why_no_expected(self) -> str | None:
        """Why no number of flips can be expected; None where one can."""
        if self.candidate_ulp is None or self.scatter is None:
            return "the candidate does not state the dtype of its logits"
        if self.baseline_ulp is None:
            return "the baseline does not state the dtype of its logits"
        finer = _middle(np.fmin(self.baseline_ulp, self.candidate_ulp))
        if float(np.mean(finer)) > self.scatter / 2:
            # The median gap change is then a step of the grid, whatever the noise is.
            return "gaps move by steps of both runs' logits, so their noise is not known"
        return None


def _scale(scatter: float, ulp: FloatArray) -> FloatArray:
    scale: FloatArray = np.maximum(scatter, ulp / 2)
    return scale


def _middle(values: NDArray[np.floating]) -> FloatArray:
    """The value in the middle of those that are not NaN, or the two: float64 [1 or 2].

    NaN if all are.
    """
    known = values[~np.isnan(values)]
    if not len(known):
        return np.array([np.nan])
    middle = np.unique([(len(known) - 1) // 2, len(known) // 2])
    known.partition(middle)
    found: FloatArray = known[middle].astype(np.float64)
    return found


def _rounded_flips(gap: FloatArray, scatter: float, unit: FloatArray) -> FloatArray:
    """E[min(1, max(0, -x) / unit)] for x ~ N(gap, scatter^2 - unit^2 / 6): float64 [N]."""
    sigma = np.sqrt(np.maximum(scatter**2 - unit**2 / 6, np.finfo(np.float64).tiny))
    flips: FloatArray = (_mean_positive(-gap, sigma) - _mean_positive(-gap - unit, sigma)) / unit
    return np.clip(flips, 0.0, 1.0)


def _mean_positive(mean: FloatArray, sigma: FloatArray) -> FloatArray:
    """E[max(0, x)] for x ~ N(mean, sigma^2): float64 [N]."""
    # Beyond 38 sigma the density is zero in float64, and squares would overflow.
    z = np.clip(mean / sigma, -40.0, 40.0)
    density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
    positive: FloatArray = mean * normal_cdf(z) + sigma * density
    return positive


def top_changes(pair: AlignedPair, *, gap_floor: float = 0.0) -> TopChanges | None:
    """Compares the best tokens; None where a run does not have its own best tokens.

    Args:
        pair: N aligned rows.
        gap_floor: p99 of the gap's change between repeats of one run, nats.
    """
    tops = pair.tops
    if tops is None:
        return None
    found = {field.name: getattr(tops, field.name) for field in fields(TopTokens)}
    return TopChanges(**found, gap_floor=gap_floor)
