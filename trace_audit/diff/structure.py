"""Where two runs differ: first rows, position buckets, worst rows, the most influential group."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trace_audit.diff.align import AlignedPair
from trace_audit.diff.bootstrap import Resampler
from trace_audit.diff.columns import FloatArray, IntArray
from trace_audit.diff.estimators import Estimator
from trace_audit.diff.intervals import clipped
from trace_audit.diff.moments import LabelledMoments, Moments
from trace_audit.diff.pair_rows import PairRows
from trace_audit.diff.summary import Influence, Place, PositionBucket

NUM_BUCKETS = 32


def place(pair: PairRows, row: int) -> Place:
    """Sequence, step and position of a row."""
    return Place(
        sequence_id=pair.trace.sequence_ids[pair.sequence[row]],
        step=int(pair.step[row]),
        position=int(pair.position(np.array([row]))[0]),
    )


def first_place(pair: PairRows, rows: NDArray[np.bool_]) -> Place | None:
    """The marked row at the lowest absolute position; of equals, the earliest sequence.

    Args:
        pair: N aligned rows.
        rows: bool [N].
    """
    firsts = []
    for piece in pair.pieces():
        marked = piece.start + np.flatnonzero(rows[piece])
        if len(marked):
            position = pair.position(marked)
            # argmin returns the first minimum, and rows are in sequence order.
            first = int(np.argmin(position))
            firsts.append((int(position[first]), int(marked[first])))
    return place(pair, min(firsts)[1]) if firsts else None


def bucket_edges(first: int, last: int, *, num_buckets: int = NUM_BUCKETS) -> IntArray:
    """Log-spaced integer edges that cover positions first..last, at most num_buckets buckets."""
    edges = np.geomspace(first + 1, last + 2, num_buckets + 1) - 1
    return np.unique(np.round(edges).astype(np.int64))


def position_range(pair: AlignedPair) -> tuple[int, int] | None:
    """Lowest and highest position of a finite row; None if there is none."""
    found = [
        (int(position.min()), int(position.max()))
        for piece in pair.pieces()
        if len(position := pair.position(piece)[pair.finite[piece]])
    ]
    return (min(low for low, _ in found), max(high for _, high in found)) if found else None


def position_buckets(pair: AlignedPair, resampler: Resampler) -> tuple[PositionBucket, ...]:
    """Mean |delta| by log-spaced absolute position; buckets without a finite token are absent."""
    covered = position_range(pair)
    if covered is None:
        return ()
    edges = bucket_edges(*covered)
    means = LabelledMoments(len(pair.group_ids))
    for piece in pair.pieces():
        finite = pair.finite[piece]
        bucket = np.searchsorted(edges, pair.position(piece)[finite], side="right") - 1
        means.add(bucket, np.abs(pair.delta[piece][finite]), pair.group[piece][finite])
    buckets = []
    for index, (start, end) in enumerate(pairwise(edges.tolist())):
        moments = means[index]
        if not moments.size:
            continue
        estimate = Estimator(resampler).mean(moments)
        buckets.append(
            PositionBucket(
                start=start,
                end=end,
                tokens=moments.size,
                mean_abs_delta=estimate.value,
                interval=clipped(estimate.interval, 0.0),
            )
        )
    return tuple(buckets)


def worst_rows(pair: AlignedPair, count: int) -> list[int]:
    """Rows by falling |delta|; non-finite candidate rows first, equal ones in trace order."""
    rows, sizes = [], []
    for piece in pair.pieces():
        size = np.where(pair.finite[piece], np.abs(pair.delta[piece]), np.inf)
        found = largest_rows(size, count)
        rows.append(piece.start + found)
        sizes.append(size[found])
    row, size = np.concatenate(rows), np.concatenate(sizes)
    found = largest_rows(size, count)
    return [int(i) for i in row[found][size[found] > 0]]


def largest_rows(values: FloatArray, count: int) -> IntArray:
    """Indices of the largest values (float64 [N], no NaN), falling, equal ones in order."""
    rows = np.arange(len(values))
    if count < len(values):
        rows = np.flatnonzero(values >= np.partition(values, len(values) - count)[-count])
    order = np.argsort(-values[rows], kind="stable")[:count]
    return rows[order]


def influence(pair: PairRows, sizes: Moments) -> Influence | None:
    """The group whose removal moves mean |delta| most; None with one group or no difference.

    Args:
        pair: The rows.
        sizes: |delta| of the finite ones.
    """
    if not sizes.total > 0 or len(pair.group_ids) < 2:
        return None
    rest = np.maximum(sizes.size - sizes.counts, 1)
    moved = np.abs(sizes.totals - sizes.mean * sizes.counts) / rest
    most = int(np.argmax(moved))
    return Influence(
        group_id=pair.group_ids[most],
        share=float(sizes.totals[most] / sizes.total),
        token_share=float(sizes.counts[most] / sizes.size),
    )
