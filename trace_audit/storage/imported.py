"""Logprobs that came with the tokens, as rows of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trace_audit.storage.schema import TOKENS_SCHEMA

FloatArray = npt.NDArray[np.floating]

_SHIFT_FROM = 0.1  # mean |delta| in nats, under which nothing is far off
_SHIFT_FACTOR = 4.0


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


def shift_warning(sequences: Sequence[ImportedSequence], recorded: pa.Table) -> str | None:
    """Says that the logprobs fit those of the token before or after far better than their own.

    Args:
        sequences: What was imported, in order of sequence_index.
        recorded: `sequence_index`, `step` and `logprob` of the record run, sorted.

    Returns:
        A full sentence; None if they are where they belong.
    """
    index = recorded["sequence_index"].to_numpy()
    logprob = recorded["logprob"].to_numpy()
    pairs = []
    for sequence in sequences:
        rows = slice(
            *np.searchsorted(index, [sequence.sequence_index, sequence.sequence_index + 1])
        )
        given = np.asarray(sequence.logprobs)
        # What is next to a token that is not scored has nothing to be shifted to.
        pairs.append((given, np.where(np.isnan(given), np.nan, logprob[rows])))
    in_place = _mean_difference(pairs)
    later = _mean_difference([(given[:-1], ours[1:]) for given, ours in pairs])
    earlier = _mean_difference([(given[1:], ours[:-1]) for given, ours in pairs])
    shifted, neighbour = min((later, "after"), (earlier, "before"))
    if not in_place > max(_SHIFT_FROM, _SHIFT_FACTOR * shifted):
        return None
    return (
        f"The imported logprobs look shifted: compared with the recorded run's they are "
        f"{in_place:.2g} nats off on average, and {shifted:.2g} if each belongs to the token "
        f"{neighbour} its own."
    )


def _mean_difference(pairs: Sequence[tuple[FloatArray, FloatArray]]) -> float:
    """Mean |a - b| over what is finite; infinite where nothing is."""
    differences = np.concatenate([np.abs(a - b) for a, b in pairs])
    finite = differences[np.isfinite(differences)]
    return float(finite.mean()) if len(finite) else float("inf")
