"""tokens.parquet as numpy arrays: one run's statistics, a row a token, float64 throughout."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class RunColumns:
    """Statistics of one run; None where the run does not have the column at all.

    Null entries of a column that is there are NaN (floats, ranks, counts) or -1 (ids). Ranks and
    counts are float64 so that they can be missing.

    Attributes:
        logprob: [N] of the forced token, nats.
        rank: [N], 1 = best.
        tie_count: [N], other tokens with the same logit.
        top_token_ids: [N, T] int64, this run's own best, -1 where none.
        top_logprobs: [N, T].
        entropy: [N], nats.
        logsumexp: [N].
        support_logprobs: [N, S] at the trace's fixed support ids.
        log_tail_mass: [N], log of the mass outside the support's top ids.
        logits_hash: [N] int64.
        has_hash: [N] bool, false where the hash is null.
        launch: [N, 3]: tokens, requests and chunk start of the launch.
        phase: [N] object array of str or None.
    """

    logprob: FloatArray
    rank: FloatArray | None = None
    tie_count: FloatArray | None = None
    top_token_ids: IntArray | None = None
    top_logprobs: FloatArray | None = None
    entropy: FloatArray | None = None
    logsumexp: FloatArray | None = None
    support_logprobs: FloatArray | None = None
    log_tail_mass: FloatArray | None = None
    logits_hash: IntArray | None = None
    has_hash: NDArray[np.bool_] | None = None
    launch: FloatArray | None = None
    phase: NDArray[np.object_] | None = None

    def take(self, rows: IntArray) -> RunColumns:
        """The same columns at some rows, in that order."""
        columns = ((field.name, getattr(self, field.name)) for field in fields(self))
        return replace(self, **{name: c[rows] for name, c in columns if c is not None})


def run_columns(table: pa.Table, *, num_support: int) -> RunColumns:
    """Statistics of a tokens.parquet table.

    Args:
        table: With the columns of ``trace_audit.storage.schema.TOKENS_SCHEMA``.
        num_support: Support ids a position, S.
    """
    hashes = table["logits_hash"]
    has_hash = None if _absent(hashes) else hashes.is_valid().to_numpy()
    top_ids = _lists(table, "top_token_ids", None, missing=-1)
    return RunColumns(
        logprob=_required_floats(table, "logprob"),
        rank=_floats(table, "rank"),
        tie_count=_floats(table, "tie_count"),
        top_token_ids=None if top_ids is None else top_ids.astype(np.int64),
        top_logprobs=_lists(table, "top_logprobs", None, missing=np.nan),
        entropy=_floats(table, "entropy"),
        logsumexp=_floats(table, "logsumexp"),
        support_logprobs=_lists(table, "support_logprobs", num_support, missing=np.nan),
        log_tail_mass=_floats(table, "log_tail_mass"),
        logits_hash=None if has_hash is None else integers(table, "logits_hash"),
        has_hash=has_hash,
        launch=_launch(table),
        phase=_phase(table),
    )


def integers(table: pa.Table, name: str) -> IntArray:
    """An integer column as int64 [N], 0 where null."""
    values: IntArray = pc.fill_null(table[name].cast(pa.int64()), 0).to_numpy()
    return values


def _required_floats(table: pa.Table, name: str) -> FloatArray:
    values: FloatArray = table[name].cast(pa.float64()).to_numpy()
    return values


def _absent(column: pa.ChunkedArray) -> bool:
    return bool(column.null_count == len(column))


def _floats(table: pa.Table, name: str) -> FloatArray | None:
    return None if _absent(table[name]) else _required_floats(table, name)


def _lists(table: pa.Table, name: str, width: int | None, *, missing: float) -> FloatArray | None:
    """A list column as float64 [N, width], padded with ``missing``; None if it is all null."""
    if _absent(table[name]):
        return None
    column = table[name].combine_chunks()
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    flat = pc.list_flatten(column).cast(pa.float64()).to_numpy(zero_copy_only=False)
    width = int(lengths.max(initial=0)) if width is None else width
    padded = np.full((len(lengths), width), missing)
    inside = np.arange(width) < lengths[:, None]
    padded[inside] = flat
    return padded


def _launch(table: pa.Table) -> FloatArray | None:
    names = ("launch_tokens", "launch_requests", "chunk_start")
    columns = [_floats(table, name) for name in names]
    present = [column for column in columns if column is not None]
    return np.stack(present, axis=1) if len(present) == len(names) else None


def _phase(table: pa.Table) -> NDArray[np.object_] | None:
    if _absent(table["phase"]):
        return None
    phases: NDArray[np.object_] = table["phase"].cast(pa.string()).to_numpy()
    return phases
