"""Periods: whether |delta| depends on the position modulo a block size."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from trace_audit.diff.align import AlignedPair
from trace_audit.diff.columns import FloatArray, IntArray
from trace_audit.diff.pattern import Period
from trace_audit.diff.special import t_quantile
from trace_audit.diff.structure import position_range

SIZES = (16, 64, 128)
_SIGNIFICANCE = 0.05
# Residues times groups that are summed at once.
_CELLS = 4_000_000


def periods(pair: AlignedPair, sizes: Iterable[int]) -> tuple[Period, ...]:
    """The residue that stands out most, of each size that the positions cover at least twice.

    Args:
        pair: N aligned rows.
        sizes: Moduli, each over 1.
    """
    covered = position_range(pair)
    if covered is None:
        return ()
    mean = float(np.abs(pair.finite_values(pair.delta)).mean())
    if mean == 0:
        return ()
    fitting = [s for s in sorted(set(sizes)) if 1 < s <= (covered[1] - covered[0] + 1) // 2]
    level = 1 - _SIGNIFICANCE / max(1, sum(fitting))
    return tuple(_period(pair, s, mean, level) for s in fitting)


def _period(pair: AlignedPair, modulus: int, mean: float, level: float) -> Period:
    groups = len(pair.group_ids)
    means, score, present = np.zeros(modulus), np.zeros(modulus), np.zeros(modulus, dtype=np.int64)
    block = max(1, _CELLS // groups)
    for start in range(0, modulus, block):
        residues = slice(start, min(start + block, modulus))
        found = _scores(*_cells(pair, modulus, residues), mean)
        means[residues], score[residues], present[residues] = found
    best = int(np.argmax(score)) if np.isfinite(score).any() else int(np.nanargmax(means))
    needed = t_quantile(level, present[best] - 1) if present[best] > 1 else np.inf
    return Period(
        size=modulus,
        residue=best,
        ratio=float(means[best]) / mean,
        stands_out=bool(score[best] > needed),
    )


def _cells(
    pair: AlignedPair, modulus: int, residues: slice
) -> tuple[FloatArray, NDArray[np.int64]]:
    """Summed |delta| and tokens by residue and group: [residues, G] each."""
    groups = len(pair.group_ids)
    shape = (residues.stop - residues.start, groups)
    totals, counts = np.zeros(shape), np.zeros(shape, dtype=np.int64)
    for piece in pair.pieces():
        residue = pair.position(piece) % modulus - residues.start
        inside = pair.finite[piece] & (residue >= 0) & (residue < shape[0])
        cell = residue[inside] * groups + pair.group[piece][inside]
        size = np.abs(pair.delta[piece][inside])
        totals += np.bincount(cell, size, totals.size).reshape(shape)
        counts += np.bincount(cell, minlength=totals.size).reshape(shape)
    return totals, counts


def _scores(
    totals: FloatArray, counts: NDArray[np.int64], mean: float
) -> tuple[FloatArray, FloatArray, IntArray]:
    """Mean of each residue, how many standard errors it is over all, and its groups."""
    tokens = counts.sum(axis=1)
    present = (counts > 0).sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = totals.sum(axis=1) / tokens
        residuals = totals - means[:, None] * counts
        spread = (residuals**2).sum(axis=1) * present / (present - 1)
        score = (means - mean) / (np.sqrt(spread) / tokens)
    # A residue of one group, or without spread, has no interval to stand out with.
    return means, np.where((present > 1) & np.isfinite(score), score, -np.inf), present
