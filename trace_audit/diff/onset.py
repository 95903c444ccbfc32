"""Onset: the first position from which most tokens have moved, and whether it stays so."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trace_audit.diff.align import AlignedPair
from trace_audit.diff.pattern import Onset

WINDOW = 16
SMALLEST_LIMIT = 1e-6
_PERSISTENT = 0.9


def onset(pair: AlignedPair, floor: float) -> Onset | None:
    """The first position p that starts a window of 16 positions of which over half have moved.

    A position has moved if |delta| is over the limit in over half of its tokens (of all sequences,
    non-finite ones included). None if there is no such window.

    Args:
        pair: N aligned rows.
        floor: |delta| that repeats explain, nats; the limit is at least 1e-6.
    """
    limit = max(floor, SMALLEST_LIMIT)
    if not len(pair):
        return None
    ends = [(p.min(), p.max()) for p in map(pair.position, pair.pieces())]
    first = int(min(low for low, _ in ends))
    length = int(max(high for _, high in ends)) - first + 1
    tokens, over = np.zeros(length, dtype=np.int64), np.zeros(length)
    for piece in pair.pieces():
        position = pair.position(piece)
        delta = pair.delta[piece]
        far = ~np.isfinite(delta) | (np.abs(delta) > limit)
        tokens += np.bincount(position - first, minlength=length)
        over += np.bincount(position - first, weights=far, minlength=length)
    moved = over > tokens / 2
    starts = np.flatnonzero(moved & (_window_sums(moved) > WINDOW / 2))
    if not len(starts):
        return None
    start = int(starts[0])
    persistence = _persistence(moved[start:], tokens[start:] > 0)
    return Onset(
        position=first + start,
        limit=limit,
        first=first,
        persistence=persistence,
        persistent=persistence >= _PERSISTENT,
    )


def _window_sums(moved: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Moved positions among each position and the 15 after it: int64 [P]."""
    padded = np.concatenate([[0], np.cumsum(np.concatenate([moved, np.zeros(WINDOW - 1)]))])
    sums: NDArray[np.int64] = (padded[WINDOW:] - padded[:-WINDOW]).astype(np.int64)
    return sums


def _persistence(moved: NDArray[np.bool_], present: NDArray[np.bool_]) -> float:
    """Share of the windows that have tokens in which over half of the positions moved."""
    window = np.arange(len(moved)) // WINDOW
    positions = np.bincount(window, weights=present)
    most = np.bincount(window, weights=moved) > positions / 2
    return float(most[positions > 0].mean())
