"""Bootstrap of quantiles on fixed log-histograms per group: cost does not grow with the tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trace_audit.diff.bootstrap import Resampler
from trace_audit.diff.intervals import CONFIDENCE

_BINS_PER_OCTAVE = 16
_LOWEST_OCTAVE = -40
_HIGHEST_OCTAVE = 10
_NUM_BINS = (_HIGHEST_OCTAVE - _LOWEST_OCTAVE) * _BINS_PER_OCTAVE


def log_bins(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Bin of each non-negative value: 0 for zero, else 1 + index of its log-spaced bin.

    Values beyond 2^-40 or 2^10 fall into the outermost bins.
    """
    bins = np.zeros(len(values), dtype=np.int64)
    positive = values > 0
    octave = np.log2(values[positive]) - _LOWEST_OCTAVE
    index = np.floor(octave * _BINS_PER_OCTAVE).astype(np.int64)
    bins[positive] = 1 + np.clip(index, 0, _NUM_BINS - 1)
    return bins


def _bin_values() -> NDArray[np.float64]:
    """Geometric middle of each bin; 0 for the zero bin."""
    middle = _LOWEST_OCTAVE + (np.arange(_NUM_BINS) + 0.5) / _BINS_PER_OCTAVE
    return np.concatenate([[0.0], np.exp2(middle)])


def bootstrap_quantiles(
    values: NDArray[np.float64],
    group: NDArray[np.int64],
    resampler: Resampler,
    levels: tuple[float, ...],
) -> list[tuple[float, float]]:
    """95 % percentile bootstrap bounds of quantiles.

    Args:
        values: float64 [N], non-negative.
        group: int64 [N], group of each value.
        resampler: Group draws.
        levels: Quantile levels in (0, 1).

    Returns:
        (low, high) for each level.
    """
    used, column = np.unique(log_bins(values), return_inverse=True)
    shape = (resampler.num_groups, len(used))
    flat = np.bincount(group * len(used) + column, minlength=shape[0] * shape[1])
    cumulative = np.cumsum(resampler.sums(flat.reshape(shape).astype(np.float64)), axis=1)
    middles = _bin_values()[used]
    bounds = []
    for level in levels:
        reached = cumulative >= level * cumulative[:, -1:]
        draws = middles[np.argmax(reached, axis=1)]
        low, high = np.quantile(draws, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
        bounds.append((float(low), float(high)))
    return bounds
