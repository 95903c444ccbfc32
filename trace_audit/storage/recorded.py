"""The trace as the record run's rows give it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trace_audit.errors import RunFailedError
from trace_audit.storage.schema import NUM_SUPPORT
from trace_audit.storage.shards import Shard
from trace_audit.storage.trace import TraceSequence


@dataclass(frozen=True, kw_only=True)
class TracePrompt:
    """What the trace takes from the prompts file; the rest comes from the shards.

    Attributes:
        sequence_id: Unique in the trace.
        group_id: Sequences of one prompt share it.
        prompt_token_ids: int32 [P], as rendered.
        score_mask: bool [T], false where a token is context only; None if all are scored.
        source: "greedy", "sampled" or "imported".
    """

    sequence_id: str
    group_id: str
    prompt_token_ids: NDArray[np.int32]
    score_mask: NDArray[np.bool_] | None = None
    source: str


def shard_sequences(
    shard: Shard, prompts: Sequence[TracePrompt], first: int
) -> list[TraceSequence]:
    """The sequences of a shard of the record run, ids and support from its rows.

    Args:
        shard: Holds the sequences from `first` on, each of them whole.
        prompts: Of the whole trace.
        first: Index of the shard's first sequence.

    Raises:
        RunFailedError: The rows are not those of the prompts.
    """
    index = shard.table["sequence_index"].to_numpy()
    starts = np.flatnonzero(np.diff(index, prepend=-1))
    expected = np.arange(first, first + len(starts))
    if not np.array_equal(index[starts], expected) or len(prompts) < first + len(starts):
        raise RunFailedError(f"A shard does not continue the trace at sequence {first}.")
    ends = [*starts[1:], len(index)]
    return [
        _sequence(shard.table.slice(start, end - start), prompts[first + i], reason)
        for i, (start, end, reason) in enumerate(
            zip(starts, ends, shard.finish_reasons, strict=True)
        )
    ]


def _sequence(rows: pa.Table, prompt: TracePrompt, finish_reason: str) -> TraceSequence:
    step = rows["step"].to_numpy()
    mask = prompt.score_mask
    matches = (
        np.array_equal(step, np.arange(len(step)))
        and np.array_equal(rows["position"].to_numpy(), len(prompt.prompt_token_ids) + step)
        and set(rows["sequence_id"].to_pylist()) == {prompt.sequence_id}
        and (mask is None or len(mask) == len(step))
    )
    if not matches:
        raise RunFailedError(
            f"The recorded rows of sequence {prompt.sequence_id!r} are not those of its prompt."
        )
    support = rows["support_token_ids"].combine_chunks().flatten().to_numpy()
    return TraceSequence(
        sequence_id=prompt.sequence_id,
        group_id=prompt.group_id,
        prompt_token_ids=np.asarray(prompt.prompt_token_ids, dtype=np.int32),
        output_token_ids=rows["token_id"].to_numpy().astype(np.int32),
        score_mask=mask,
        finish_reason=finish_reason,
        source=prompt.source,
        support_token_ids=support.astype(np.int32).reshape(len(step), NUM_SUPPORT),
    )
