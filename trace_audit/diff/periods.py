"""Periods: whether |delta| depends on the position modulo a block size."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from trace_audit.diff.align import AlignedPair
from trace_audit.diff.columns import FloatArray, IntArray
from trace_audit.diff.pattern import Period
from trace_audit.diff.special import t_quantile

SIZES = (16, 64, 128)
_SIGNIFICANCE = 0.05


def periods(pair: AlignedPair, sizes: Iterable[int]) -> tuple[Period, ...]:
    """The residue that stands out most, of each size that the positions cover at least twice.

    Args:
        pair: N aligned rows.
        sizes: Moduli, each over 1.
    """
    rows = np.flatnonzero(pair.finite)
    if not len(rows):
        return ()
    position, size = pair.position[rows], np.abs(pair.delta[rows])
    mean = float(size.mean())
    if mean == 0:
        return ()
    covered = [s for s in sorted(set(sizes)) if 1 < s <= (int(np.ptp(position)) + 1) // 2]
    level = 1 - _SIGNIFICANCE / max(1, sum(covered))
    group = pair.group[rows]
    return tuple(_period(position % s, s, group, size, mean, level) for s in covered)


def _period(
    residue: IntArray, modulus: int, group: IntArray, size: FloatArray, mean: float, level: float
) -> Period:
    groups = int(group.max()) + 1
    cell = residue * groups + group
    shape = (modulus, groups)
    totals = np.bincount(cell, weights=size, minlength=modulus * groups).reshape(shape)
    counts = np.bincount(cell, minlength=modulus * groups).reshape(shape)
    tokens = counts.sum(axis=1)
    present = (counts > 0).sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = totals.sum(axis=1) / tokens
        residuals = totals - means[:, None] * counts
        spread = (residuals**2).sum(axis=1) * present / (present - 1)
        score = (means - mean) / (np.sqrt(spread) / tokens)
    # A residue of one group, or without spread, has no interval to stand out with.
    score = np.where((present > 1) & np.isfinite(score), score, -np.inf)
    best = int(np.argmax(score)) if np.isfinite(score).any() else int(np.nanargmax(means))
    needed = t_quantile(level, present[best] - 1) if present[best] > 1 else np.inf
    return Period(
        size=modulus,
        residue=best,
        ratio=float(means[best]) / mean,
        stands_out=bool(score[best] > needed),
    )
