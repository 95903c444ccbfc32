"""Changes of the best token: flips, hard flips, and ties that merely fell the other way."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trace_audit.diff.align import AlignedPair
from trace_audit.diff.columns import FloatArray, IntArray, RunColumns
from trace_audit.diff.special import normal_cdf

MANTISSA_BITS = {"float32": 23, "bfloat16": 7, "float16": 10}
_MAD_TO_SIGMA = 1.4826


@dataclass(frozen=True, kw_only=True)
class TopChanges:
    """What became of the best token at each of N positions.

    Attributes:
        known: bool, both runs' best tokens are known and the row is finite.
        flip: bool, the best token changed and neither side has a tie between the two.
        tie_change: bool, the best token changed otherwise.
        gap: float64, the baseline's gap between its own best two ids, nats; NaN if unknown.
        candidate_gap: float64, the candidate's gap between those same ids, signed.
        ulp: float64, unit in the last place of the stored logits at the top logit, the coarser of
            the two runs; None where neither run's logit dtype is known.
        baseline_ulp: float64, that of the baseline; None where its logit dtype is not known.
        candidate_ulp: float64, that of the candidate.
        gap_floor: p99 of |gap_B - gap_A| between repeats of one run, nats; 0 without repeats.
    """

    known: NDArray[np.bool_]
    flip: NDArray[np.bool_]
    tie_change: NDArray[np.bool_]
    gap: FloatArray
    candidate_gap: FloatArray
    ulp: FloatArray | None
    baseline_ulp: FloatArray | None = None
    candidate_ulp: FloatArray | None = None
    gap_floor: float = 0.0

    @cached_property
    def gap_change(self) -> FloatArray:
        """|gap_B - gap_A| where both are known: float64 [<= N]."""
        with np.errstate(invalid="ignore"):  # one id alone is left by a filter on both sides
            change = np.abs(self.candidate_gap - self.gap)
        return change[np.isfinite(change) & self.known]

    @cached_property
    def scale(self) -> FloatArray | None:
        """s = max(1.4826 median |gap_B - gap_A|, u / 2) of each position: float64 [N]."""
        if self.ulp is None or not len(self.gap_change):
            return None
        return np.maximum(self.scatter, self.ulp / 2)

    @cached_property
    def threshold(self) -> FloatArray | None:
        """tau = max(3 s, 2 u, gap_floor) of each position: float64 [N]."""
        if self.scale is None or self.ulp is None:
            return None
        return np.maximum(np.maximum(3 * self.scale, 2 * self.ulp), self.gap_floor)

    @cached_property
    def hard(self) -> NDArray[np.bool_] | None:
        """Flips whose baseline gap is over the threshold: bool [N]."""
        return None if self.threshold is None else self.flip & (self.gap > self.threshold)

    @cached_property
    def near_tie(self) -> NDArray[np.bool_] | None:
        """Positions whose baseline gap is not over the threshold: bool [N]."""
        return None if self.threshold is None else self.known & (self.gap <= self.threshold)

    @cached_property
    def expected(self) -> FloatArray | None:
        """Probability that noise flips each position: float64 [N]; None where it is not known.

        With x ~ N(gap, sigma^2) the gap before the candidate's logits are rounded, a strict flip
        is left after rounding with probability min(1, max(0, -x) / u_B): rounding alone never
        turns an order round, it only makes ties. Rounding two logits adds u_B^2 / 6 to the variance
        of the gap, which is taken off the observed one.
        """
        if self.why_no_expected is not None or self.candidate_ulp is None:
            return None
        # No noise flips an infinite gap: a filter left one id.
        counted = self.known & (self.gap > 0) & np.isfinite(self.gap)
        unit = self.candidate_ulp[counted]
        # Zero where the gap is zero: a change there is a tie change, not a flip.
        expected = np.zeros(len(self.gap))
        expected[counted] = _rounded_flips(self.gap[counted], self.scatter, unit)
        return expected

    @cached_property
    def scatter(self) -> float:
        """1.4826 median |gap_B - gap_A|, nats; 0 where no gap is known in both runs."""
        change = self.gap_change
        return _MAD_TO_SIGMA * float(np.median(change)) if len(change) else 0.0

    @cached_property
    def why_no_expected(self) -> str | None:
        """Why no number of flips can be expected; None where one can."""
        if self.candidate_ulp is None or not len(self.gap_change):
            return "the candidate does not state the dtype of its logits"
        if self.baseline_ulp is None:
            return "the baseline does not state the dtype of its logits"
        finer = np.fmin(self.baseline_ulp, self.candidate_ulp)
        if float(np.nanmedian(finer)) > self.scatter / 2:
            # The median gap change is then a step of the grid, whatever the noise is.
            return "gaps move by steps of both runs' logits, so their noise is not known"
        return None


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
    baseline, candidate = pair.baseline, pair.candidate
    if _top(baseline) is None or _top(candidate) is None:
        return None
    ids_a, best_a = _best_two(baseline)
    ids_b, best_b = _best_two(candidate)
    in_b = [logprob_at(ids_a[:, i], candidate, pair.support_token_ids) for i in (0, 1)]
    in_a = logprob_at(ids_b[:, 0], baseline, pair.support_token_ids)
    known = pair.finite & np.isfinite(best_a[:, 0]) & np.isfinite(best_b[:, 0])
    changed = known & (ids_a[:, 0] != ids_b[:, 0])
    strict = _strictly_below(in_b[0], candidate) & _strictly_below(in_a, baseline)
    ulps = (
        _ulp(baseline, pair.baseline_logit_dtype),
        _ulp(candidate, pair.candidate_logit_dtype),
    )
    stated = [ulp for ulp in ulps if ulp is not None]
    return TopChanges(
        known=known,
        flip=changed & strict,
        tie_change=changed & ~strict,
        gap=np.where(known, best_a[:, 0] - best_a[:, 1], np.nan),
        candidate_gap=np.where(known, in_b[0] - in_b[1], np.nan),
        ulp=np.fmax.reduce(stated) if stated else None,
        baseline_ulp=ulps[0],
        candidate_ulp=ulps[1],
        gap_floor=gap_floor,
    )


def logprob_at(ids: IntArray, run: RunColumns, support_token_ids: IntArray) -> FloatArray:
    """A run's logprob at one id per position, from its own best and the trace's support.

    Args:
        ids: int64 [N].
        run: With its own best tokens.
        support_token_ids: int64 [N, S].

    Returns:
        float64 [N], NaN where the id is in neither list.
    """
    found = np.full(len(ids), np.nan)
    lists = [(support_token_ids, run.support_logprobs), (run.top_token_ids, run.top_logprobs)]
    for list_ids, logprobs in lists:
        if list_ids is None or logprobs is None or not list_ids.shape[1]:
            continue
        match = (list_ids == ids[:, None]) & (ids[:, None] >= 0)
        inside = match.any(axis=1)
        column = np.argmax(match, axis=1)
        found[inside] = logprobs[inside, column[inside]]
    return found


def unit_in_last_place(logits: FloatArray, dtype: str) -> FloatArray:
    """Spacing of a float format's values at each logit: float64 [N].

    Args:
        logits: float64 [N].
        dtype: float32, bfloat16 or float16.
    """
    exponent = np.frexp(np.maximum(np.abs(logits), np.finfo(np.float32).tiny))[1] - 1
    spacing: FloatArray = np.ldexp(1.0, exponent - MANTISSA_BITS[dtype])
    return spacing


def _top(run: RunColumns) -> FloatArray | None:
    if run.top_token_ids is None or run.top_logprobs is None or run.top_token_ids.shape[1] < 2:
        return None
    return run.top_logprobs


def _best_two(run: RunColumns) -> tuple[IntArray, FloatArray]:
    assert run.top_token_ids is not None
    assert run.top_logprobs is not None
    return run.top_token_ids[:, :2], run.top_logprobs[:, :2]


def _strictly_below(logprob: FloatArray, run: RunColumns) -> NDArray[np.bool_]:
    """Whether a logprob is under the run's maximum.

    An id that is in no list is at most as good as the run's last stored best, so it is under the
    maximum unless all stored ones tie; then nothing is known and the change is not called a flip.
    """
    assert run.top_logprobs is not None
    best = run.top_logprobs[:, 0]
    last = run.top_logprobs[:, -1]
    return np.where(np.isnan(logprob), last < best, logprob < best)


def _ulp(run: RunColumns, dtype: str | None) -> FloatArray | None:
    if dtype is None or run.top_logprobs is None or run.logsumexp is None:
        return None
    return unit_in_last_place(run.top_logprobs[:, 0] + run.logsumexp, dtype)
