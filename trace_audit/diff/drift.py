"""Drift: whether |delta| grows with the position, robustly and by sequence."""

from __future__ import annotations

import numpy as np

from trace_audit.diff.align import AlignedPair
from trace_audit.diff.bootstrap import Resampler
from trace_audit.diff.columns import FloatArray
from trace_audit.diff.intervals import percentile_interval
from trace_audit.diff.pattern import Drift
from trace_audit.diff.structure import position_range

NUM_BINS = 24
_MIN_BINS = 3
_PER = 1000.0
_CHUNK_DRAWS = 250


def drift(pair: AlignedPair, resampler: Resampler) -> Drift | None:
    """Theil-Sen slope of mean |delta| over up to 24 equal position bins.

    The slope is the median of the slopes between all pairs of bins; its interval comes from
    resampling whole groups. None with under three bins.
    """
    covered = position_range(pair)
    if covered is None:
        return None
    first, span = covered[0], covered[1] - covered[0] + 1
    groups = len(pair.group_ids)
    # Summed in each group and bin: |delta|, tokens, position.
    totals, counts, positions = (np.zeros((groups, NUM_BINS)) for _ in range(3))
    for piece in pair.pieces():
        finite = pair.finite[piece]
        position = pair.position(piece)[finite]
        bins = (position - first) * NUM_BINS // max(span, NUM_BINS)
        cell = pair.group[piece][finite].astype(np.int64) * NUM_BINS + bins
        size = np.abs(pair.delta[piece][finite])
        for sums, weights in ((totals, size), (counts, None), (positions, position)):
            sums += np.bincount(cell, weights, groups * NUM_BINS).reshape(sums.shape)
    used = counts.any(axis=0)
    if used.sum() < _MIN_BINS:
        return None
    totals, counts, positions = totals[:, used], counts[:, used], positions[:, used]
    middle = positions.sum(axis=0) / counts.sum(axis=0)
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
