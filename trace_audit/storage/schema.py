"""Columns of every file of an audit directory.

History of the format:

- 1: trace, vocabulary and runs as described in ``docs/formats.md``.
- 2: whole distributions at some positions beside the record run (``full_logprobs.parquet``), and
  the exact KL there beside every replay (``exact_kl.parquet``). Later, without another number:
  ``expert_ids`` in the runs of models with routers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pyarrow as pa

FORMAT_VERSION = 2
FORMAT_NAME = "trace-audit"

NUM_TOP = 5
SUPPORT_TOP_K = 20
SUPPORT_TAIL_DRAWS = 4
NUM_SUPPORT = SUPPORT_TOP_K + SUPPORT_TAIL_DRAWS


def with_optional(
    schema: pa.Schema, names: Collection[str], optional: Sequence[pa.Field]
) -> pa.Schema:
    """The schema and those of the optional fields that are among the names of a table's columns."""
    return pa.schema([*schema, *(field for field in optional if field.name in names)])


def _list(value: pa.DataType, *, nullable: bool = True) -> pa.DataType:
    return pa.list_(pa.field("element", value, nullable=nullable))


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


TOKENS_SCHEMA: pa.Schema = pa.schema(
    [
        _required("sequence_index", pa.int32()),
        _required("sequence_id", pa.string()),
        _required("step", pa.int32()),
        _required("position", pa.int32()),
        pa.field("phase", pa.dictionary(pa.int32(), pa.string())),
        _required("token_id", pa.int32()),
        _required("logprob", pa.float32()),
        pa.field("rank", pa.int32()),
        pa.field("tie_count", pa.int32()),
        pa.field("top_token_ids", _list(pa.int32())),
        pa.field("top_logprobs", _list(pa.float32())),
        pa.field("entropy", pa.float32()),
        pa.field("logsumexp", pa.float32()),
        pa.field("support_logprobs", _list(pa.float32())),
        pa.field("log_tail_mass", pa.float32()),
        pa.field("logits_hash", pa.int64()),
        pa.field("launch_tokens", pa.int32()),
        pa.field("launch_requests", pa.int32()),
        pa.field("chunk_start", pa.int32()),
    ]
)
"""A row an output token, sorted by (sequence_index, step)."""

SHARD_SCHEMA: pa.Schema = TOKENS_SCHEMA.append(pa.field("support_token_ids", _list(pa.int32())))
"""What a shard keeps until the run is merged; the support ids then move to the trace."""

OPTIONAL_FIELDS: tuple[pa.Field, ...] = (
    pa.field("expert_ids", _list(pa.uint16(), nullable=False)),
)
"""Columns behind those of either schema, in runs whose model has what they are of."""

TRACE_SCHEMA: pa.Schema = pa.schema(
    [
        _required("sequence_id", pa.string()),
        _required("group_id", pa.string()),
        _required("prompt_token_ids", _list(pa.int32(), nullable=False)),
        _required("output_token_ids", _list(pa.int32(), nullable=False)),
        pa.field("score_mask", _list(pa.bool_(), nullable=False)),
        _required("finish_reason", pa.string()),
        _required("source", pa.string()),
        _required("support_token_ids", _list(_list(pa.int32(), nullable=False), nullable=False)),
    ]
)
"""A row a sequence, in the order of the prompts file."""

VOCABULARY_SCHEMA: pa.Schema = pa.schema(
    [
        _required("token_id", pa.int32()),
        _required("bytes", pa.binary()),
        _required("special", pa.bool_()),
    ]
)
"""A row an id of the model's logits, in order."""

FULL_LOGPROBS_SCHEMA: pa.Schema = pa.schema(
    [
        _required("sequence_index", pa.int32()),
        _required("step", pa.int32()),
        _required("logprobs", _list(pa.float32(), nullable=False)),
    ]
)
"""A row a position whose whole distribution is kept, sorted by (sequence_index, step)."""

EXACT_KL_SCHEMA: pa.Schema = pa.schema(
    [
        _required("sequence_index", pa.int32()),
        _required("step", pa.int32()),
        _required("kl_from_record", pa.float64()),
        _required("kl_to_record", pa.float64()),
    ]
)
"""KL(record || run) and KL(run || record) at those positions, in the same order."""

PHASES = ("prefill", "decode", "verify")
SOURCES = ("greedy", "sampled", "imported")
