"""The token trace: what every run scores."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trace_audit.storage.schema import NUM_SUPPORT, TRACE_SCHEMA

_DIGEST_TAG = b"trace-audit trace 1\n"


@dataclass(frozen=True, kw_only=True)
class TraceTokens:
    """The tokens of one sequence of the trace: prompt, and the ones to score.

    Attributes:
        sequence_id: Unique in the trace.
        group_id: Sequences of one prompt share it.
        prompt_token_ids: int32 [P].
        output_token_ids: int32 [T].
        score_mask: bool [T], false where a token is context only; None if all are scored.
        source: "greedy", "sampled" or "imported".
    """

    sequence_id: str
    group_id: str
    prompt_token_ids: NDArray[np.int32]
    output_token_ids: NDArray[np.int32]
    score_mask: NDArray[np.bool_] | None
    source: str


TOKEN_COLUMNS = tuple(field.name for field in fields(TraceTokens))


@dataclass(frozen=True, kw_only=True)
class TraceSequence(TraceTokens):
    """One sequence of the trace with where to measure KL.

    Attributes:
        finish_reason: Why the sequence ended.
        support_token_ids: int32 [T, 24], the record run's 20 best ids and 4 draws from its own
            tail, -1 where there is none.
    """

    finish_reason: str
    support_token_ids: NDArray[np.int32]

    def __post_init__(self) -> None:
        length = len(self.output_token_ids)
        assert self.support_token_ids.shape == (length, NUM_SUPPORT)
        assert self.score_mask is None or len(self.score_mask) == length


class TraceDigest:
    """sha256 of a trace's content, whatever wrote the file that holds it.

    Over, a sequence after the other: sequence id, group id, prompt ids, output ids, score mask
    and support ids; each as its length in bytes (uint64, little-endian) and then its bytes (UTF-8;
    int32 little-endian; one byte a mask entry). A mask that is None has the length 2**64 - 1 and
    no bytes, so that it differs from one that scores everything.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256(_DIGEST_TAG)

    def update(self, sequence: TraceSequence) -> None:
        """Adds the next sequence."""
        parts = [
            sequence.sequence_id.encode(),
            sequence.group_id.encode(),
            sequence.prompt_token_ids.astype("<i4").tobytes(),
            sequence.output_token_ids.astype("<i4").tobytes(),
            None if sequence.score_mask is None else sequence.score_mask.astype("u1").tobytes(),
            sequence.support_token_ids.astype("<i4").tobytes(),
        ]
        for part in parts:
            self._digest.update(struct.pack("<Q", 2**64 - 1 if part is None else len(part)))
            self._digest.update(part or b"")

    def hexdigest(self) -> str:
        """Of the sequences so far."""
        return self._digest.hexdigest()


def trace_digest(sequences: Iterable[TraceSequence]) -> str:
    """Hex sha256 of a whole trace; see :class:`TraceDigest`."""
    digest = TraceDigest()
    for sequence in sequences:
        digest.update(sequence)
    return digest.hexdigest()


def trace_table(sequences: Sequence[TraceSequence]) -> pa.Table:
    """The trace in `TRACE_SCHEMA`."""
    support = np.concatenate([s.support_token_ids for s in sequences])
    rows = _fixed_lists(support, TRACE_SCHEMA.field("support_token_ids").type.value_type)
    lengths = [len(s.output_token_ids) for s in sequences]
    return pa.table(
        [
            pa.array([s.sequence_id for s in sequences], pa.string()),
            pa.array([s.group_id for s in sequences], pa.string()),
            _lists([s.prompt_token_ids for s in sequences], "prompt_token_ids"),
            _lists([s.output_token_ids for s in sequences], "output_token_ids"),
            _masks(sequences),
            pa.array([s.finish_reason for s in sequences], pa.string()),
            pa.array([s.source for s in sequences], pa.string()),
            pa.ListArray.from_arrays(
                _offsets(lengths), rows, type=TRACE_SCHEMA.field("support_token_ids").type
            ),
        ],
        schema=TRACE_SCHEMA,
    )


def trace_tokens(table: pa.Table) -> list[TraceTokens]:
    """The tokens of the sequences of a table with `TOKEN_COLUMNS`.

    Raises:
        ValueError: A mask is not as long as the output.
    """
    columns = {name: table[name].combine_chunks() for name in TOKEN_COLUMNS}
    return [TraceTokens(**_tokens(columns, row)) for row in range(table.num_rows)]


def trace_sequences(table: pa.Table) -> list[TraceSequence]:
    """The sequences of a table in `TRACE_SCHEMA`.

    Raises:
        ValueError: The lists of a row do not have the lengths that belong together.
    """
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    return [_sequence(columns, row) for row in range(table.num_rows)]


def _sequence(columns: dict[str, pa.Array], row: int) -> TraceSequence:
    tokens = _tokens(columns, row)
    support = _support(columns["support_token_ids"][row].values)
    _check_length(row, support, tokens["output_token_ids"])
    return TraceSequence(
        **tokens,
        finish_reason=columns["finish_reason"][row].as_py(),
        support_token_ids=support,
    )


def _tokens(columns: dict[str, pa.Array], row: int) -> dict[str, Any]:
    """Fields of :class:`TraceTokens`."""
    output, mask = int32_array(columns["output_token_ids"][row].values), columns["score_mask"][row]
    score_mask = np.array(mask.values, dtype=np.bool_) if mask.is_valid else None
    if score_mask is not None:
        _check_length(row, score_mask, output)
    return {
        "sequence_id": columns["sequence_id"][row].as_py(),
        "group_id": columns["group_id"][row].as_py(),
        "prompt_token_ids": int32_array(columns["prompt_token_ids"][row].values),
        "output_token_ids": output,
        "score_mask": score_mask,
        "source": columns["source"][row].as_py(),
    }


def _check_length(row: int, values: NDArray[np.generic], output: NDArray[np.int32]) -> None:
    if len(values) != len(output):
        raise ValueError(f"row {row} has lists of other lengths than its output")


def _support(rows: pa.ListArray) -> NDArray[np.int32]:
    widths = np.diff(rows.offsets.to_numpy())
    if (widths != NUM_SUPPORT).any():
        raise ValueError(f"a support row has other than {NUM_SUPPORT} ids")
    return int32_array(rows.flatten()).reshape(len(rows), NUM_SUPPORT)


def int32_array(values: pa.Array) -> NDArray[np.int32]:
    """An Arrow array of ids as int32 of its own memory."""
    return np.array(values.to_numpy(zero_copy_only=False), dtype=np.int32)


def _offsets(lengths: Sequence[int]) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())


def _lists(arrays: Sequence[NDArray[np.int32]], name: str) -> pa.ListArray:
    flat = pa.array(np.concatenate(arrays), pa.int32())
    kind = TRACE_SCHEMA.field(name).type
    return pa.ListArray.from_arrays(_offsets([len(a) for a in arrays]), flat, type=kind)


def _fixed_lists(values: NDArray[np.int32], kind: pa.DataType) -> pa.ListArray:
    count, width = values.shape
    flat = pa.array(values.ravel(), pa.int32())
    return pa.ListArray.from_arrays(_offsets([width] * count), flat, type=kind)


def _masks(sequences: Sequence[TraceSequence]) -> pa.Array:
    masks = [None if s.score_mask is None else s.score_mask.tolist() for s in sequences]
    return pa.array(masks, TRACE_SCHEMA.field("score_mask").type)
