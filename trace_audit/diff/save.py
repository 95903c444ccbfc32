"""Per-token diffs beside the runs: derived data, always replaced as a whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trace_audit.diff.columns import FloatArray
from trace_audit.diff.compare import Comparison
from trace_audit.diff.summary import ReportSummary
from trace_audit.errors import AuditDirError


def diff_table(comparison: Comparison) -> pa.Table:
    """One row per scored token; statistics that a run lacks are null, non-finite ones stay."""
    pair, changes = comparison.pair, comparison.changes
    delta = pair.delta
    known = None if changes is None else ~changes.known
    columns = {
        "sequence_index": pa.array(pair.sequence, pa.int32()),
        "sequence_id": pa.array(
            np.array(pair.trace.sequence_ids, dtype=object)[pair.sequence], pa.string()
        ),
        "step": pa.array(pair.step, pa.int32()),
        "position": pa.array(pair.position, pa.int32()),
        "token_id": pa.array(pair.token_id, pa.int32()),
        "baseline_logprob": pa.array(pair.baseline.logprob, pa.float32()),
        "candidate_logprob": pa.array(pair.candidate.logprob, pa.float32()),
        "delta": pa.array(delta, pa.float64()),
        "abs_delta": pa.array(np.abs(delta), pa.float64()),
        "flip": _flags(None if changes is None else changes.flip, known),
        "hard_flip": _flags(None if changes is None else changes.hard, known),
        "tie_change": _flags(None if changes is None else changes.tie_change, known),
        "margin": _nullable(None if changes is None else changes.gap, len(pair)),
        "candidate_margin": _nullable(
            None if changes is None else changes.candidate_gap, len(pair)
        ),
        "baseline_rank": _nullable(pair.baseline.rank, len(pair), pa.int32()),
        "candidate_rank": _nullable(pair.candidate.rank, len(pair), pa.int32()),
        "baseline_top1": _top1(comparison, "baseline"),
        "candidate_top1": _top1(comparison, "candidate"),
        "kl_contribution": _nullable(
            None if comparison.kl is None else comparison.kl.estimate, len(pair)
        ),
    }
    columns = {
        name: pa.nulls(len(pair), pa.bool_()) if column is None else column
        for name, column in columns.items()
    }
    return pa.table(columns)


def save_comparison(
    directory: Path, comparison: Comparison, summary: ReportSummary, text: str
) -> None:
    """Writes <candidate>-vs-<baseline>.parquet and .json into a diffs directory.

    Args:
        directory: Created if missing.
        comparison: The pair.
        summary: Only for its baseline's name.
        text: The JSON report of this pair.

    Raises:
        AuditDirError: The directory cannot be written.
    """
    stem = f"{comparison.summary.candidate.name}-vs-{summary.baseline}"
    table = diff_table(comparison)
    try:
        directory.mkdir(exist_ok=True)
        _replace(
            directory / f"{stem}.parquet",
            lambda path: pq.write_table(table, path, compression="zstd"),
        )
        _replace(directory / f"{stem}.json", lambda path: path.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise AuditDirError(
            f"Diffs cannot be written to {directory}: {error.strerror or error}.",
            hint="Use --no-save for an audit that is read-only.",
        ) from error


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


def _nullable(values: FloatArray | None, size: int, kind: pa.DataType | None = None) -> pa.Array:
    """Values with NaN as null; all null where there are none."""
    kind = pa.float64() if kind is None else kind
    if values is None:
        return pa.nulls(size, kind)
    return pa.array(values, pa.float64(), from_pandas=True).cast(kind)


def _flags(
    values: np.ndarray[tuple[int], np.dtype[np.bool_]] | None,
    unknown: np.ndarray[tuple[int], np.dtype[np.bool_]] | None,
) -> pa.Array | None:
    return None if values is None else pa.array(values, pa.bool_(), mask=unknown)


def _top1(comparison: Comparison, side: str) -> pa.Array:
    run = comparison.pair.baseline if side == "baseline" else comparison.pair.candidate
    if run.top_token_ids is None or not run.top_token_ids.shape[1]:
        return pa.nulls(len(comparison.pair), pa.int32())
    best = run.top_token_ids[:, 0]
    return pa.array(best, pa.int32(), mask=best < 0)
