"""Drift: whether |delta| grows with the position, robustly and by sequence."""

from __future__ import annotations

import numpy as np

from trace_audit.diff.align import AlignedPair
from trace_audit.diff.bootstrap import Resampler
from trace_audit.diff.columns import FloatArray
from trace_audit.diff.intervals import percentile_interval
from trace_audit.diff.pattern import Drift

NUM_BINS = 24
_MIN_BINS = 3
_PER = 1000.0
_CHUNK_DRAWS = 250


def drift(pair: AlignedPair, resampler: Resampler) -> Drift | None:
    """Theil-Sen slope of mean |delta| over up to 24 equal position bins.

    The slope is the median of the slopes between all pairs of bins; its interval comes from
    resampling whole groups. None with under three bins.
    """
    rows = np.flatnonzero(pair.finite)
    if not len(rows):
        return None
    position = pair.position[rows]
    span = int(np.ptp(position)) + 1
    bins = (position - position.min()) * NUM_BINS // max(span, NUM_BINS)
    used, column = np.unique(bins, return_inverse=True)
    if len(used) < _MIN_BINS:
        return None
    groups = len(pair.group_ids)
    cell = pair.group[rows] * len(used) + column

    def sums(weights: FloatArray) -> FloatArray:
        """Sum in each group and bin: float64 [G, B]."""
        flat = np.bincount(cell, weights=weights, minlength=groups * len(used))
        return flat.reshape(groups, len(used)).astype(np.float64)

    totals, counts = sums(np.abs(pair.delta[rows])), sums(np.ones(len(rows)))
    middle = sums(position.astype(np.float64)).sum(axis=0) / counts.sum(axis=0)
    slope = theil_sen(middle, (totals.sum(axis=0) / counts.sum(axis=0))[None, :])[0]
    interval = None
    if groups > 1:
        with np.errstate(invalid="ignore", divide="ignore"):
            means = resampler.sums(totals) / resampler.sums(counts)
        chunks = [means[i : i + _CHUNK_DRAWS] for i in range(0, len(means), _CHUNK_DRAWS)]
        slopes = np.concatenate([theil_sen(middle, chunk) for chunk in chunks])
        interval = percentile_interval(slopes * _PER)
    return Drift(slope=float(slope) * _PER, interval=interval)


def theil_sen(x: FloatArray, y: FloatArray) -> FloatArray:
    """Median of pairwise slopes of each row; pairs with a NaN are left out.

    Args:
        x: float64 [B], distinct.
        y: float64 [D, B].

    Returns:
        float64 [D].
    """
    i, j = np.triu_indices(len(x), k=1)
    slopes = (y[:, j] - y[:, i]) / (x[j] - x[i])
    known = ~np.isnan(slopes).all(axis=1)
    result = np.full(len(y), np.nan)
    result[known] = np.nanmedian(slopes[known], axis=1)
    return result
