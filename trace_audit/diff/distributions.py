"""How |delta| is distributed, and how it depends on the baseline's confidence."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from trace_audit.diff.align import AlignedPair
from trace_audit.diff.bootstrap import Resampler
from trace_audit.diff.estimators import Estimator
from trace_audit.diff.intervals import clipped
from trace_audit.diff.label_means import BUCKET_EDGES
from trace_audit.diff.summary import Interval

BINS_PER_DECADE = 4
_LOWEST_DECADE, _HIGHEST_DECADE = -9, 2


@dataclass(frozen=True, kw_only=True)
class HistogramBin:
    """Tokens with low <= |delta| < high (nats); zero itself is in no bin."""

    low: float
    high: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """|delta| of every row of a pair.

    Attributes:
        zero: Tokens whose delta is exactly 0.
        bins: Adjacent and log-spaced, from the first to the last that holds a token. The first may
            start at 0 (under 1e-9 nats), the last may end at infinity (100 nats and over).
        non_finite: Tokens whose delta is not finite.
    """

    zero: int
    bins: tuple[HistogramBin, ...]
    non_finite: int


@dataclass(frozen=True, kw_only=True)
class ConfidenceBucket:
    """Tokens where the baseline gives its own best token a probability in [low, high).

    The last bucket holds its upper end too.

    Attributes:
        mean_abs_delta: Nats; None without tokens.
        interval: None without tokens, or with those of one group only.
    """

    low: float
    high: float
    tokens: int
    mean_abs_delta: float | None
    interval: Interval | None


def histogram(pair: AlignedPair) -> Histogram:
    """Counts of |delta| in log-spaced bins, exact zeros and non-finite values apart."""
    size = np.abs(pair.finite_values(pair.delta))
    decades = np.arange(_LOWEST_DECADE * BINS_PER_DECADE, _HIGHEST_DECADE * BINS_PER_DECADE + 1)
    edges = np.power(10.0, decades / BINS_PER_DECADE)
    found = np.searchsorted(edges, size[size > 0], side="right")
    counts = np.bincount(found, minlength=len(edges) + 1)
    bounds = [0.0, *edges.tolist(), float("inf")]
    filled = np.flatnonzero(counts)
    kept = range(filled[0], filled[-1] + 1) if len(filled) else range(0)
    return Histogram(
        zero=int((size == 0).sum()),
        bins=tuple(
            HistogramBin(low=bounds[i], high=bounds[i + 1], tokens=int(counts[i])) for i in kept
        ),
        non_finite=int((~pair.finite).sum()),
    )


def confidence_buckets(
    pair: AlignedPair, resampler: Resampler
) -> tuple[ConfidenceBucket, ...] | None:
    """Mean |delta| by the baseline's top-1 probability; None if it lacks its best tokens.

    Args:
        pair: N aligned rows.
        resampler: Draws of the pair's groups.
    """
    means = pair.labels.buckets
    if means is None:
        return None
    buckets = []
    for index, (low, high) in enumerate(pairwise(BUCKET_EDGES)):
        moments = means[index]
        mean = interval = None
        if moments.size:
            estimate = Estimator(resampler).mean(moments)
            mean, interval = estimate.value, clipped(estimate.interval, 0.0)
        buckets.append(
            ConfidenceBucket(
                low=low, high=high, tokens=moments.size, mean_abs_delta=mean, interval=interval
            )
        )
    return tuple(buckets)
