"""A piece of tokens.parquet as numpy arrays: a run's statistics, a row a token.

Numbers are float64, but lists of them as they are stored: a batch is mostly lists.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trace_audit.storage.schema import PHASES

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
IdArray = NDArray[np.int32]

_NAN, _NO_ID = pa.scalar(np.nan), pa.scalar(-1, pa.int32())
NO_EXPERT = 65_535
"""In the place of an expert's id that is missing."""
_NO_EXPERT = pa.scalar(NO_EXPERT, pa.uint16())
_LAUNCH = ("launch_tokens", "launch_requests", "chunk_start")


@dataclass(frozen=True, kw_only=True)
class RunColumns:
    """Statistics of some rows of one run; None where the run does not have the column at all.

    Null entries of a column that is there are NaN (floats, ranks, counts) or -1 (ids). Ranks and
    counts are float64 so that they can be missing.

    Attributes:
        logprob: [N] of the forced token, nats.
        rank: [N], 1 = best.
        tie_count: [N], other tokens with the same logit.
        top_token_ids: [N, T] int32, this run's own best, -1 where none.
        top_logprobs: float [N, T].
        entropy: [N], nats.
        logsumexp: [N].
        support_logprobs: float [N, S] at the trace's fixed support ids.
        log_tail_mass: [N], log of the mass outside the support's top ids.
        logits_hash: [N] int64.
        has_hash: [N] bool, false where the hash is null.
        launch: [N, 3]: tokens, requests and chunk start of the launch.
        phase: [N] int8, index into ``PHASES``, -1 where none.
        expert_ids: [N, L * k] uint16, what the router of each of L layers chose, ascending;
            `NO_EXPERT` where missing.
    """

    logprob: FloatArray
    rank: FloatArray | None = None
    tie_count: FloatArray | None = None
    top_token_ids: IdArray | None = None
    top_logprobs: NDArray[np.floating] | None = None
    entropy: FloatArray | None = None
    logsumexp: FloatArray | None = None
    support_logprobs: NDArray[np.floating] | None = None
    log_tail_mass: FloatArray | None = None
    logits_hash: IntArray | None = None
    has_hash: NDArray[np.bool_] | None = None
    launch: FloatArray | None = None
    phase: NDArray[np.int8] | None = None
    expert_ids: NDArray[np.uint16] | None = None

    def take(self, rows: IntArray) -> RunColumns:
        """The same columns at some rows, in that order."""
        columns = ((field.name, getattr(self, field.name)) for field in fields(self))
        return replace(self, **{name: c[rows] for name, c in columns if c is not None})


def run_columns(
    table: pa.Table, *, num_support: int, present: Collection[str] | None = None
) -> RunColumns:
    """Statistics of rows of tokens.parquet.

    Args:
        table: Columns of tokens.parquet, "logprob" and any others.
        num_support: Support ids a position, S.
        present: Columns that the run has, in other rows if not in these. None: the columns of the
            table that are not all null.
    """
    if present is None:
        present = present_columns(table)
    has = set(present) & set(table.column_names)

    def floats(name: str) -> FloatArray | None:
        return _floats(table, name) if name in has else None

    def lists(name: str, width: int | None) -> NDArray[np.floating] | None:
        return _lists(table[name], width, _NAN) if name in has else None

    hashes = table["logits_hash"] if "logits_hash" in has else None
    best = table["top_token_ids"] if "top_token_ids" in has else None
    return RunColumns(
        logprob=_floats(table, "logprob"),
        rank=floats("rank"),
        tie_count=floats("tie_count"),
        top_token_ids=None if best is None else _lists(best, None, _NO_ID),
        top_logprobs=lists("top_logprobs", None),
        entropy=floats("entropy"),
        logsumexp=floats("logsumexp"),
        support_logprobs=lists("support_logprobs", num_support),
        log_tail_mass=floats("log_tail_mass"),
        logits_hash=None if hashes is None else integers(table, "logits_hash"),
        has_hash=None if hashes is None else hashes.is_valid().to_numpy(),
        launch=_launch(table) if has.issuperset(_LAUNCH) else None,
        phase=_phase(table["phase"]) if "phase" in has else None,
        expert_ids=_lists(table["expert_ids"], None, _NO_EXPERT) if "expert_ids" in has else None,
    )


def present_columns(table: pa.Table) -> frozenset[str]:
    """Columns with a value that is not null."""
    return frozenset(n for n in table.column_names if table[n].null_count < len(table))


def integers(table: pa.Table, name: str) -> IntArray:
    """An integer column as int64 [N], 0 where null."""
    values: IntArray = pc.fill_null(table[name].cast(pa.int64()), 0).to_numpy()
    return values


def _floats(table: pa.Table, name: str) -> FloatArray:
    values: FloatArray = table[name].cast(pa.float64()).to_numpy()
    return values


def _lists(column: pa.ChunkedArray, width: int | None, missing: pa.Scalar) -> NDArray[Any]:
    """A list column as [N, width], padded with ``missing``; None: as wide as the widest list."""
    rows = column.combine_chunks()
    values = rows.flatten()
    if values.null_count:
        values = pc.fill_null(values, missing.cast(values.type))
    flat = values.to_numpy(zero_copy_only=False)
    if rows.null_count:
        lengths = pc.fill_null(pc.list_value_length(rows), 0).to_numpy(zero_copy_only=False)
    else:
        lengths = np.diff(rows.offsets.to_numpy())
    width = int(lengths.max(initial=0)) if width is None else width
    if (lengths == width).all():
        whole: NDArray[Any] = flat.reshape(len(lengths), width)
        return whole
    padded = np.full((len(lengths), width), missing.as_py(), dtype=flat.dtype)
    padded[np.arange(width) < lengths[:, None]] = flat
    return padded


def _launch(table: pa.Table) -> FloatArray:
    return np.stack([_floats(table, name) for name in _LAUNCH], axis=1)


def _phase(column: pa.ChunkedArray) -> NDArray[np.int8]:
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    rows = column.combine_chunks()
    known = {name: i for i, name in enumerate(PHASES)}
    codes = [known.get(name, -1) for name in rows.dictionary.to_pylist()]
    # The last one is what a null looks up.
    indices = pc.fill_null(rows.indices, len(codes)).to_numpy(zero_copy_only=False)
    phases: NDArray[np.int8] = np.array([*codes, -1], dtype=np.int8)[indices]
    return phases
