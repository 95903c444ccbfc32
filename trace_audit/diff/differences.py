"""Which stored columns of two runs differ anywhere, and in how many rows."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from trace_audit.diff.batches import AlignedBatch
from trace_audit.diff.columns import RunColumns
from trace_audit.diff.pair_rows import PairRows

BoolArray = NDArray[np.bool_]

# What a row says of its launch rather than of its logits.
_LAUNCH_COLUMNS = ("launch", "phase")


@dataclass(frozen=True, kw_only=True)
class RowDifferences:
    """Differences between the columns of ``RunColumns`` that both runs have.

    Attributes:
        rows: Rows that differ in something else than their launch.
        columns: The columns that it is in.
        moved: bool [N], rows from launches of another shape.
    """

    rows: int
    columns: tuple[str, ...]
    moved: BoolArray


class DifferenceCollector:
    """Fills :class:`RowDifferences`."""

    def __init__(self, rows: PairRows) -> None:
        """Of no rows yet."""
        self._rows = 0
        self._columns: set[str] = set()
        self._moved = np.zeros(len(rows), dtype=np.bool_)

    def add(self, batch: AlignedBatch) -> None:
        """The next rows."""
        any_column = np.zeros(len(batch), dtype=np.bool_)
        for field in fields(RunColumns):
            a, b = getattr(batch.baseline, field.name), getattr(batch.candidate, field.name)
            if a is None or b is None:
                continue
            different = _different(a, b)
            if field.name in _LAUNCH_COLUMNS:
                self._moved[batch.rows] |= different
            elif different.any():
                self._columns.add(field.name)
                any_column |= different
        self._rows += int(any_column.sum())

    def result(self) -> RowDifferences:
        """Of all rows."""
        names = (field.name for field in fields(RunColumns))
        columns = tuple(name for name in names if name in self._columns)
        return RowDifferences(rows=self._rows, columns=columns, moved=self._moved)


def _different(a: NDArray[np.generic], b: NDArray[np.generic]) -> BoolArray:
    """Rows that are not equal, where NaN equals itself: bool [n]."""
    if a.shape != b.shape:
        return np.ones(len(a), dtype=np.bool_)
    different = a != b
    if a.dtype.kind == "f":
        different &= ~(np.isnan(a) & np.isnan(b))
    rows: BoolArray = different.reshape(len(a), -1).any(axis=1)
    return rows
