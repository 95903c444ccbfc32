"""Where two runs differ: first rows, position buckets, worst rows, the most influential group."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trace_audit.diff.align import AlignedPair
from trace_audit.diff.bootstrap import Resampler
from trace_audit.diff.columns import IntArray
from trace_audit.diff.estimators import GroupedTokens
from trace_audit.diff.intervals import clipped
from trace_audit.diff.summary import Influence, Place, PositionBucket

NUM_BUCKETS = 32


def place(pair: AlignedPair, row: int) -> Place:
    """Sequence, step and position of a row."""
    return Place(
        sequence_id=pair.trace.sequence_ids[pair.sequence[row]],
        step=int(pair.step[row]),
        position=int(pair.position[row]),
    )


def first_place(pair: AlignedPair, rows: NDArray[np.bool_]) -> Place | None:
    """The marked row at the lowest absolute position; of equals, the earliest sequence.

    Args:
        pair: N aligned rows.
        rows: bool [N].
    """
    marked = np.flatnonzero(rows)
    if not len(marked):
        return None
    # argmin returns the first minimum, and rows are in sequence order.
    return place(pair, int(marked[np.argmin(pair.position[marked])]))


def bucket_edges(first: int, last: int, *, num_buckets: int = NUM_BUCKETS) -> IntArray:
    """Log-spaced integer edges that cover positions first..last, at most num_buckets buckets."""
    edges = np.geomspace(first + 1, last + 2, num_buckets + 1) - 1
    return np.unique(np.round(edges).astype(np.int64))


def position_buckets(pair: AlignedPair, resampler: Resampler) -> tuple[PositionBucket, ...]:
    """Mean |delta| by log-spaced absolute position; buckets without a finite token are absent."""
    rows = np.flatnonzero(pair.finite)
    if not len(rows):
        return ()
    position, size = pair.position[rows], np.abs(pair.delta[rows])
    edges = bucket_edges(int(position.min()), int(position.max()))
    bucket = np.searchsorted(edges, position, side="right") - 1
    order = np.argsort(bucket, kind="stable")
    bounds = np.searchsorted(bucket[order], np.arange(len(edges)))
    buckets = []
    for index, (start, end) in enumerate(pairwise(bounds)):
        if start == end:
            continue
        inside = order[start:end]
        estimate = GroupedTokens(pair.group[rows[inside]], resampler).mean(size[inside])
        buckets.append(
            PositionBucket(
                start=int(edges[index]),
                end=int(edges[index + 1]),
                tokens=len(inside),
                mean_abs_delta=estimate.value,
                interval=clipped(estimate.interval, 0.0),
            )
        )
    return tuple(buckets)


def worst_rows(pair: AlignedPair, count: int) -> list[int]:
    """Rows by falling |delta|; non-finite candidate rows first, equal ones in trace order."""
    size = np.where(pair.finite, np.abs(pair.delta), np.inf)
    return [int(row) for row in np.argsort(-size, kind="stable")[:count] if size[row] > 0]


def influence(pair: AlignedPair) -> Influence | None:
    """The group whose removal moves mean |delta| most; None with one group or no difference."""
    size = np.abs(pair.delta[pair.finite])
    if not len(size) or not size.any() or len(pair.group_ids) < 2:
        return None
    group = pair.group[pair.finite]
    totals = np.bincount(group, weights=size, minlength=len(pair.group_ids))
    counts = np.bincount(group, minlength=len(pair.group_ids))
    rest = np.maximum(len(size) - counts, 1)
    moved = np.abs(totals - size.mean() * counts) / rest
    most = int(np.argmax(moved))
    return Influence(
        group_id=pair.group_ids[most],
        share=float(totals[most] / size.sum()),
        token_share=float(counts[most] / len(size)),
    )
