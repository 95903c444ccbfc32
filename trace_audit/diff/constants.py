"""Columns of a run that have one value at every compared token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trace_audit.diff.batches import AlignedBatch
from trace_audit.diff.columns import FloatArray, RunColumns

# Numbers of the logits: two rows that share one by chance are rare.
_VARYING = ("logprob", "entropy", "logsumexp", "log_tail_mass")


@dataclass(frozen=True, kw_only=True)
class Constant:
    """One value in all rows of a column; ``candidate`` says of which side."""

    candidate: bool
    column: str
    value: float


class ConstantCollector:
    """Looks at every batch until a column has had two values."""

    def __init__(self) -> None:
        """Of no rows yet."""
        self._first: dict[tuple[bool, str], float] = {}
        self._varied: set[tuple[bool, str]] = set()

    def add(self, batch: AlignedBatch) -> None:
        """The next rows."""
        for candidate, run in ((False, batch.baseline), (True, batch.candidate)):
            for column in _VARYING:
                self._look(candidate, column, run)

    def result(self) -> tuple[Constant, ...]:
        """The columns that had one finite value, the baseline's first."""
        return tuple(
            Constant(candidate=candidate, column=column, value=value)
            for (candidate, column), value in self._first.items()
            if (candidate, column) not in self._varied and np.isfinite(value)
        )

    def _look(self, candidate: bool, column: str, run: RunColumns) -> None:
        key = (candidate, column)
        values: FloatArray | None = getattr(run, column)
        if key in self._varied or values is None or not len(values):
            return
        first = self._first.setdefault(key, float(values[0]))
        if not (values == first).all():
            self._varied.add(key)
