"""Logprobs that came with the tokens, as rows of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from trace_audit.storage.schema import TOKENS_SCHEMA


@dataclass(frozen=True, kw_only=True)
class ImportedSequence:
    """The logprobs of one imported sequence.

    Attributes:
        sequence_index: Its place in the trace.
        sequence_id: Its id.
        prompt_length: Prompt tokens, P.
        token_ids: T output tokens.
        logprobs: T logprobs, nats; NaN for a token that is not scored.
    """

    sequence_index: int
    sequence_id: str
    prompt_length: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]


def imported_tokens(sequences: Sequence[ImportedSequence]) -> pa.Table:
    """Rows in `TOKENS_SCHEMA` with ids and logprobs; everything else is null.

    Args:
        sequences: At least one, in order of sequence_index.
    """
    lengths = [len(sequence.token_ids) for sequence in sequences]
    step = np.concatenate([np.arange(length) for length in lengths])
    prompt = np.repeat([sequence.prompt_length for sequence in sequences], lengths)
    index = np.repeat([sequence.sequence_index for sequence in sequences], lengths)
    ids = np.repeat(np.array([s.sequence_id for s in sequences], dtype=object), lengths)
    columns = {
        "sequence_index": pa.array(index, pa.int32()),
        "sequence_id": pa.array(ids, pa.string()),
        "step": pa.array(step, pa.int32()),
        "position": pa.array(prompt + step, pa.int32()),
        "token_id": pa.array(np.concatenate([s.token_ids for s in sequences]), pa.int32()),
        "logprob": pa.array(
            np.concatenate([s.logprobs for s in sequences]).astype(np.float32), pa.float32()
        ),
    }
    return pa.table(
        [
            columns[field.name] if field.name in columns else pa.nulls(len(step), field.type)
            for field in TOKENS_SCHEMA
        ],
        schema=TOKENS_SCHEMA,
    )
