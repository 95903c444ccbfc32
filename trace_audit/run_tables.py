"""Engine outputs as rows of `tokens.parquet`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trace_audit.engine.request import PHASES, RequestOutput
from trace_audit.storage.schema import OPTIONAL_FIELDS, SHARD_SCHEMA, with_optional


def shard_table(outputs: Sequence[RequestOutput], sequence_indices: Sequence[int]) -> pa.Table:
    """Rows of one shard, sorted by (sequence_index, step), in `SHARD_SCHEMA`.

    What the model's routers chose stands behind it, where it has any.

    Args:
        outputs: one a sequence, in trace order.
        sequence_indices: the sequences' positions in the trace.
    """
    tables = [
        _sequence_table(output, index)
        for output, index in zip(outputs, sequence_indices, strict=True)
    ]
    return pa.concat_tables(tables).combine_chunks()


def num_nonfinite_rows(outputs: Sequence[RequestOutput]) -> int:
    """Rows whose normalizer is not finite."""
    return sum(int((~np.isfinite(o.logsumexp)).sum()) for o in outputs)


def num_impossible_tokens(outputs: Sequence[RequestOutput]) -> int:
    """Tokens of probability 0: a filter left them out, or their logit is -inf."""
    return sum(int((np.isneginf(o.logprob) & np.isfinite(o.logsumexp)).sum()) for o in outputs)


def _sequence_table(output: RequestOutput, index: int) -> pa.Table:
    count = len(output.token_ids)
    # A row without a finite normalizer has no rank; its NaNs are stored as they are.
    unranked = output.rank == 0
    columns = {
        "sequence_index": np.full(count, index, dtype=np.int32),
        "sequence_id": pa.array([output.request_id] * count, pa.string()),
        "step": np.arange(count, dtype=np.int32),
        "position": output.position,
        "phase": _phases(output.phase),
        "token_id": output.token_ids,
        "logprob": output.logprob,
        "rank": pa.array(output.rank, mask=unranked),
        "tie_count": pa.array(output.tie_count, mask=unranked),
        "top_token_ids": _lists(output.top_token_ids),
        "top_logprobs": _lists(output.top_logprobs),
        "entropy": output.entropy,
        "logsumexp": output.logsumexp,
        "support_logprobs": _lists(output.support_logprobs, output.support_token_ids == -1),
        "log_tail_mass": output.log_tail_mass,
        "logits_hash": output.logits_hash,
        "launch_tokens": output.launch_tokens,
        "launch_requests": output.launch_requests,
        "chunk_start": output.chunk_start,
        "support_token_ids": _lists(output.support_token_ids),
    }
    if output.expert_ids.shape[1]:
        columns["expert_ids"] = _lists(output.expert_ids.reshape(count, -1))
    schema = with_optional(SHARD_SCHEMA, columns, OPTIONAL_FIELDS)
    return pa.table(
        [
            pa.array(columns[f.name], f.type)
            if isinstance(columns[f.name], np.ndarray)
            else columns[f.name].cast(f.type)
            for f in schema
        ],
        schema=schema,
    )


def _phases(codes: npt.NDArray[np.int8]) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), pa.array(PHASES))


def _lists(
    values: npt.NDArray[np.generic], mask: npt.NDArray[np.bool_] | None = None
) -> pa.ListArray:
    """[n, k] as n lists of k; elements under `mask` are null."""
    count, width = values.shape
    offsets = np.arange(count + 1, dtype=np.int32) * width
    flat = pa.array(values.ravel(), mask=None if mask is None else mask.ravel())
    return pa.ListArray.from_arrays(offsets, flat)
