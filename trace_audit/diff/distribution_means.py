"""Averages of what a run stores of its whole distribution, summed up a batch at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trace_audit.diff.batches import AlignedBatch
from trace_audit.diff.columns import FloatArray, IdArray
from trace_audit.diff.moments import Moments
from trace_audit.diff.pair_rows import PairRows

# Metric -> column, and what a report calls it.
DRIFTS = {"lse.drift": ("logsumexp", "logsumexp"), "entropy.drift": ("entropy", "entropy")}
_RANK, _TIES = "rank.changed", ("ties.baseline", "ties.candidate")


class DistributionMeans:
    """Changes of logsumexp, entropy and rank, and ties, of a pair.

    Attributes:
        found: Moments of each metric (of events, for a share) over the rows that have what it
            needs; None where a run lacks the column.
    """

    def __init__(self, rows: PairRows) -> None:
        """Of no rows yet."""
        a, b = rows.baseline_run.columns, rows.candidate_run.columns
        present = {name: column in a & b for name, (column, _) in DRIFTS.items()}
        present[_RANK] = "rank" in a & b
        present |= {name: "tie_count" in run for name, run in zip(_TIES, (a, b), strict=True)}
        groups = len(rows.group_ids)
        self.found = {name: Moments(groups) if has else None for name, has in present.items()}

    def add(self, batch: AlignedBatch) -> None:
        """The next rows."""
        a, b = batch.baseline, batch.candidate
        for name, (column, _) in DRIFTS.items():
            if self.found[name] is not None:
                with np.errstate(invalid="ignore"):
                    change = getattr(b, column) - getattr(a, column)
                self._add(name, change, np.isfinite(change), batch.group)
        if a.rank is not None and b.rank is not None:
            known = np.isfinite(a.rank) & np.isfinite(b.rank)
            self._add(_RANK, a.rank != b.rank, known, batch.group)
        for name, run in zip(_TIES, (a, b), strict=True):
            if run.tie_count is not None:
                self._add(name, run.tie_count > 0, np.isfinite(run.tie_count), batch.group)

    def _add(
        self,
        name: str,
        values: FloatArray | NDArray[np.bool_],
        known: NDArray[np.bool_],
        group: IdArray,
    ) -> None:
        moments = self.found[name]
        assert moments is not None
        moments.add(values[known], group[known])
