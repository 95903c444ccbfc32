"""Rows of the compared runs side by side, a few whole sequences at a time.

This is the only place where the wide columns of a run are in memory: best tokens, support, hashes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trace_audit.diff.columns import (
    FloatArray,
    IdArray,
    IntArray,
    RunColumns,
    integers,
    run_columns,
)
from trace_audit.diff.pair_rows import PairRows
from trace_audit.diff.run_rows import STATISTICS, RunRows
from trace_audit.diff.trace_index import TraceIndex
from trace_audit.storage.schema import NUM_SUPPORT

# Tokens of the trace in a batch; a longer sequence is a batch of its own.
BATCH_TOKENS = 16_384
# Wide, and of no use but side by side.
_OF_SIDES = frozenset({"expert_ids"})


@dataclass(frozen=True, kw_only=True)
class AlignedBatch:
    """Consecutive rows of a pair with everything that the runs store of them.

    Attributes:
        rows: Where they are among the pair's N rows.
        group: int32 [n], dense group index.
        support_token_ids: int32 [n, 24], -1 where none.
        record: None where there is no record run that has every compared token, or it is not read.
        referee: None where none was named, it lacks a compared token, or it is not read.
    """

    rows: slice
    group: IdArray
    support_token_ids: IdArray
    baseline: RunColumns
    candidate: RunColumns
    record: RunColumns | None
    referee: RunColumns | None

    def __len__(self) -> int:
        """Rows, n."""
        return int(self.rows.stop - self.rows.start)

    @cached_property
    def delta(self) -> FloatArray:
        """Candidate minus baseline logprob, nats: float64 [n]."""
        with np.errstate(invalid="ignore"):  # -inf on both sides
            return self.candidate.logprob - self.baseline.logprob

    @cached_property
    def finite(self) -> NDArray[np.bool_]:
        """Rows that enter averages: bool [n]."""
        return np.isfinite(self.delta)


def aligned_batches(
    pair: PairRows,
    *,
    columns: Collection[str] = STATISTICS,
    sides_only: bool = False,
    sequences: Sequence[int] | None = None,
) -> Iterator[AlignedBatch]:
    """The pair's rows, in order.

    Args:
        pair: Which rows.
        columns: Nullable columns that are read of those that a run has; of record and referee
            without the experts that they chose.
        sides_only: Read neither record and referee nor the support, whose ids are all -1 then.
        sequences: Ascending indices of the sequences that are read, a batch each. None: all.
    """
    trace = pair.trace
    ranges = _ranges(pair) if sequences is None else [range(i, i + 1) for i in sequences]
    record, referee = (None, None) if sides_only else (pair.record_run, pair.referee_run)
    used = (pair.baseline_run, pair.candidate_run, record, referee)
    runs = {run.name: run for run in used if run is not None}
    sides = (pair.baseline_name, pair.candidate_name)
    tables = {
        name: _tables(run, columns if name in sides else set(columns) - _OF_SIDES, ranges)
        for name, run in runs.items()
    }
    supports = None if sides_only else trace.reader.support(ranges)
    for sequence_range in ranges:
        chosen = _chosen(pair, sequence_range)
        read = {
            name: _columns(trace, runs[name], next(tables[name]), sequence_range, chosen)
            for name in runs
        }
        count = trace.start[sequence_range.stop] - trace.start[sequence_range.start]
        if supports is None:
            ids = np.full((count, NUM_SUPPORT), -1, dtype=np.int32)
        else:
            ids = next(supports)
        first_row = pair.first_row[sequence_range.start : sequence_range.stop + 1]
        groups = pair.group_of[sequence_range.start : sequence_range.stop]
        yield AlignedBatch(
            rows=slice(int(first_row[0]), int(first_row[-1])),
            group=np.repeat(groups, np.diff(first_row)),
            support_token_ids=ids if chosen is None else ids[chosen],
            baseline=read[pair.baseline_name],
            candidate=read[pair.candidate_name],
            record=None if record is None else read[record.name],
            referee=None if referee is None else read[referee.name],
        )


def _ranges(pair: PairRows) -> list[range]:
    """The sequences that have rows, cut into batches of consecutive ones."""
    start = pair.trace.start
    ranges: list[range] = []
    for index in pair.sequences.tolist():
        open_range = ranges[-1] if ranges else None
        if (
            open_range is not None
            and open_range.stop == index
            and start[index + 1] - start[open_range.start] <= BATCH_TOKENS
        ):
            ranges[-1] = range(open_range.start, index + 1)
        else:
            ranges.append(range(index, index + 1))
    return ranges


def _tables(run: RunRows, columns: Collection[str], ranges: Sequence[range]) -> Iterator[pa.Table]:
    """A run's rows of each range of sequences."""
    rows = [range(int(run.first_row[r.start]), int(run.first_row[r.stop])) for r in ranges]
    read = [name for name in STATISTICS if name in run.columns and name in columns]
    return run.reader.slices(rows, ["sequence_index", "step", "logprob", *read])


def _chosen(pair: PairRows, sequences: range) -> IntArray | None:
    """Which of the sequences' tokens are rows of the pair; None if all are."""
    if pair.wanted is None:
        return None
    start = pair.trace.start
    wanted = pair.wanted[start[sequences.start] : start[sequences.stop]]
    return None if wanted.all() else np.flatnonzero(wanted)


def _columns(
    trace: TraceIndex, run: RunRows, table: pa.Table, sequences: range, chosen: IntArray | None
) -> RunColumns:
    """A run's statistics at the chosen tokens of some sequences, all of which it has."""
    first, last = trace.start[sequences.start], trace.start[sequences.stop]
    columns = run_columns(table, num_support=NUM_SUPPORT, present=run.columns)
    if chosen is None and run.in_order and len(table) == last - first:
        return columns
    local = trace.start[integers(table, "sequence_index")] + integers(table, "step") - first
    row_of = np.full(last - first, -1, dtype=np.int64)
    row_of[local] = np.arange(len(local))
    rows = row_of if chosen is None else row_of[chosen]
    assert (rows >= 0).all()
    return columns.take(rows)
