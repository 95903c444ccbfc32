"""A few rows of a pair, with the distributions that the runs store there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trace_audit.diff.batches import AlignedBatch
from trace_audit.diff.columns import FloatArray, IdArray, IntArray, RunColumns
from trace_audit.diff.kl import FixedSupport, KLTerms, fixed_support, fixed_support_kl


@dataclass(frozen=True, kw_only=True)
class SampledRun:
    """One run at n rows.

    Attributes:
        logprob: float64 [n], of the forced token, nats.
        support: At the fixed support; None where the run does not have it.
    """

    logprob: FloatArray
    support: FixedSupport | None


@dataclass(frozen=True, kw_only=True)
class RowSample:
    """Both sides and the record run at n rows.

    Attributes:
        row: int64 [n], rows of the pair, ascending.
        record: None where no record run has every compared token.
        support_token_ids: int32 [n, S], -1 where none.
    """

    row: IntArray
    baseline: SampledRun
    candidate: SampledRun
    record: SampledRun | None
    support_token_ids: IdArray

    def kl(self, *, reverse: bool = False) -> KLTerms | None:
        """KL(baseline || candidate) or its reverse at each row; None where it cannot be had."""
        x, y = self.baseline.support, self.candidate.support
        record = None if self.record is None else self.record.support
        if x is None or y is None or record is None:
            return None
        sides = (y, x) if reverse else (x, y)
        return fixed_support_kl(*sides, record, self.support_token_ids)


class SampleCollector:
    """Picks the rows that are wanted off each batch."""

    def __init__(self, row: IntArray) -> None:
        """Of rows of the pair, ascending and not empty."""
        self._row = row
        self._parts: dict[str, list[SampledRun]] = {}
        self._ids: list[IdArray] = []

    def add(self, batch: AlignedBatch) -> None:
        """The next rows."""
        first, last = np.searchsorted(self._row, [batch.rows.start, batch.rows.stop])
        if first == last:
            return
        local = self._row[first:last] - batch.rows.start
        self._ids.append(batch.support_token_ids[local])
        sides = {"baseline": batch.baseline, "candidate": batch.candidate, "record": batch.record}
        for name, columns in sides.items():
            if columns is not None:
                self._parts.setdefault(name, []).append(_sampled(columns, local))

    def result(self) -> RowSample:
        """All of them."""
        record = self._parts.get("record")
        return RowSample(
            row=self._row,
            baseline=_joined(self._parts["baseline"]),
            candidate=_joined(self._parts["candidate"]),
            record=None if record is None else _joined(record),
            support_token_ids=np.concatenate(self._ids),
        )


def _sampled(columns: RunColumns, local: IntArray) -> SampledRun:
    support = fixed_support(columns)
    if support is not None:
        support = support.at(local)
    return SampledRun(logprob=columns.logprob[local], support=support)


def _joined(parts: list[SampledRun]) -> SampledRun:
    supports = [part.support for part in parts if part.support is not None]
    support = None
    if len(supports) == len(parts):
        support = FixedSupport(
            logprobs=np.concatenate([s.logprobs for s in supports]).astype(np.float64),
            log_tail=np.concatenate([s.log_tail for s in supports]),
        )
    return SampledRun(logprob=np.concatenate([p.logprob for p in parts]), support=support)
