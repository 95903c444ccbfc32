"""Per-token diffs beside the runs: derived data, always replaced as a whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from trace_audit.diff.align import AlignedPair
from trace_audit.diff.batches import aligned_batches
from trace_audit.diff.columns import FloatArray, RunColumns
from trace_audit.diff.compare import Comparison
from trace_audit.diff.flips import TopChanges
from trace_audit.diff.read_ahead import read_ahead
from trace_audit.diff.router_totals import RouterTotals
from trace_audit.errors import AuditDirError

_ROW_GROUP = 131_072
# Columns of few values; in all others a dictionary only costs.
_REPEATED = [
    "sequence_index",
    "sequence_id",
    "baseline_rank",
    "candidate_rank",
    "flip",
    "hard_flip",
    "tie_change",
    "routers_changed",
]
_SCHEMA = pa.schema(
    [
        ("sequence_index", pa.int32()),
        ("sequence_id", pa.string()),
        ("step", pa.int32()),
        ("position", pa.int32()),
        ("token_id", pa.int32()),
        ("baseline_logprob", pa.float32()),
        ("candidate_logprob", pa.float32()),
        ("delta", pa.float64()),
        ("abs_delta", pa.float64()),
        ("flip", pa.bool_()),
        ("hard_flip", pa.bool_()),
        ("tie_change", pa.bool_()),
        ("margin", pa.float64()),
        ("candidate_margin", pa.float64()),
        ("baseline_rank", pa.int32()),
        ("candidate_rank", pa.int32()),
        ("baseline_top1", pa.int32()),
        ("candidate_top1", pa.int32()),
        ("kl_contribution", pa.float64()),
        ("routers_changed", pa.int32()),
    ]
)


def diff_tables(comparison: Comparison) -> Iterator[pa.Table]:
    """One row per scored token; statistics that a run lacks are null, non-finite ones stay.

    Ranks and best ids are read again; a table is a batch of rows.
    """
    pair, changes = comparison.pair, comparison.changes
    ids = pa.array(pair.trace.sequence_ids, pa.string())
    token_id = pair.token_id
    for batch in aligned_batches(pair, columns=("rank", "top_token_ids"), sides_only=True):
        rows = batch.rows
        delta, sequence = pair.delta[rows], pa.array(pair.sequence[rows])
        columns: dict[str, pa.Array | None] = {
            "sequence_index": sequence,
            "sequence_id": ids.take(sequence),
            "step": pa.array(pair.step[rows]),
            "position": pa.array(pair.position(rows), pa.int32()),
            "token_id": pa.array(token_id[rows], pa.int32()),
            "baseline_logprob": pa.array(pair.baseline_stored[rows]),
            "candidate_logprob": pa.array(pair.candidate_stored[rows]),
            "delta": pa.array(delta),
            "abs_delta": pa.array(np.abs(delta)),
            "baseline_rank": _numbers(batch.baseline.rank, pa.int32()),
            "candidate_rank": _numbers(batch.candidate.rank, pa.int32()),
            "baseline_top1": _top1(batch.baseline),
            "candidate_top1": _top1(batch.candidate),
            "kl_contribution": _numbers(
                None if pair.kl.estimate is None else pair.kl.estimate[rows]
            ),
            "routers_changed": _routers_changed(pair, rows),
            **({} if changes is None else _changes(changes, rows)),
        }
        arrays = [columns.get(field.name) for field in _SCHEMA]
        yield pa.table(
            [
                pa.nulls(len(batch), field.type) if array is None else array
                for field, array in zip(_SCHEMA, arrays, strict=True)
            ],
            schema=_SCHEMA,
        )


def save_comparison(directory: Path, comparison: Comparison, text: str) -> None:
    """Writes <candidate>-vs-<baseline>.parquet and .json into a diffs directory.

    Args:
        directory: Created if missing.
        comparison: The pair.
        text: The JSON report of this pair.

    Raises:
        AuditDirError: The directory cannot be written.
    """
    summary = comparison.summary
    stem = f"{summary.candidate.name}-vs-{summary.baseline.name}"
    try:
        directory.mkdir(exist_ok=True)
        _replace(directory / f"{stem}.parquet", lambda path: _write(path, diff_tables(comparison)))
        _replace(directory / f"{stem}.json", lambda path: path.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise AuditDirError(
            f"Diffs cannot be written to {directory}: {error.strerror or error}.",
            hint="Use --no-save for an audit that is read-only.",
        ) from error


def _write(path: Path, tables: Iterator[pa.Table]) -> None:
    """Row groups of a few batches each: what is in memory of the file is one of them."""
    with pq.ParquetWriter(path, _SCHEMA, compression="zstd", use_dictionary=_REPEATED) as writer:
        for group in read_ahead(_row_groups(tables)):
            writer.write_table(group, row_group_size=len(group))


def _row_groups(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    held: list[pa.Table] = []
    for table in tables:
        held.append(table)
        if sum(map(len, held)) >= _ROW_GROUP:
            yield pa.concat_tables(held)
            held = []
    if held:
        yield pa.concat_tables(held)


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    # The process id keeps two reports on one audit from writing the same temporary file.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _changes(changes: TopChanges, rows: slice) -> dict[str, pa.Array | None]:
    unknown = ~changes.known[rows]

    def flags(values: NDArray[np.bool_] | None) -> pa.Array | None:
        return None if values is None else pa.array(values[rows], pa.bool_(), mask=unknown)

    return {
        "flip": flags(changes.flip),
        "hard_flip": flags(changes.hard),
        "tie_change": flags(changes.tie_change),
        "margin": _numbers(changes.gap[rows]),
        "candidate_margin": _numbers(changes.candidate_gap[rows]),
    }


def _routers_changed(pair: AlignedPair, rows: slice) -> pa.Array | None:
    if not isinstance(pair.router, RouterTotals):
        return None
    return pa.array(pair.router.changed[rows], pa.int32())


def _numbers(values: FloatArray | None, kind: pa.DataType | None = None) -> pa.Array | None:
    """Values with NaN as null; None where there are none."""
    if values is None:
        return None
    numbers = pa.array(values, pa.float64(), from_pandas=True)
    return numbers if kind is None else numbers.cast(kind)


def _top1(run: RunColumns) -> pa.Array | None:
    if run.top_token_ids is None or not run.top_token_ids.shape[1]:
        return None
    best = run.top_token_ids[:, 0]
    return pa.array(best, pa.int32(), mask=best < 0)
