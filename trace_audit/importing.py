"""Logprobs that came with imported tokens: a run of their own, and what gives bad ones away."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trace_audit.config import distribution_of
from trace_audit.storage.import_shift import found_shift
from trace_audit.storage.imported import ImportedSequence, imported_tokens
from trace_audit.storage.prompts import PromptEntry, import_warnings
from trace_audit.storage.record_writer import RecordWriter

_UNDECLARED = (
    "The prompts file does not say how its logprobs were made, so the run named imported can be "
    'reported and not gated: "scoring": {"mode": "raw"} on every line would say it.'
)


def import_messages(entries: Sequence[PromptEntry]) -> list[str]:
    """What a user should know of the imported logprobs before anything runs."""
    given = [entry for entry in entries if entry.logprobs is not None]
    undeclared = [_UNDECLARED] if given and given[0].scoring is None else []
    return [*import_warnings(entries), *undeclared]


def add_imported(
    writer: RecordWriter,
    entries: Sequence[PromptEntry],
    prompt_lengths: Sequence[int],
    *,
    vocabulary_size: int,
) -> str | None:
    """Make a run of the logprobs that came with the tokens, if any did.

    Args:
        writer: of the record; all its shards are finished.
        entries: the prompts file.
        prompt_lengths: tokens of each rendered prompt.
        vocabulary_size: of the recorded model.

    Returns:
        What is wrong with them beside the record's own, as a sentence; None if nothing is.
    """
    given = [
        ImportedSequence(
            sequence_index=entry.index,
            sequence_id=entry.sequence_id,
            prompt_length=length,
            token_ids=entry.output_token_ids,
            logprobs=entry.logprobs,
        )
        for entry, length in zip(entries, prompt_lengths, strict=True)
        if entry.output_token_ids is not None and entry.logprobs is not None
    ]
    if not given:
        return None
    scoring = entries[given[0].sequence_index].scoring
    declared = {}
    if scoring is not None:
        distribution = distribution_of(scoring).within(vocabulary_size)
        declared = {
            "scoring": scoring.model_dump(),
            "logprobs": "raw" if distribution.is_raw else "processed",
        }
    partial = len(given) < len(entries)
    writer.add_imported_run(
        imported_tokens(given),
        {
            "model": None,
            "vocabulary_size": vocabulary_size,
            "capabilities": {"logprob": "exact"},
            "subset": [s.sequence_id for s in given] if partial else None,
            **declared,
        },
    )
    return _shift_message(writer, given)


def _shift_message(writer: RecordWriter, given: Sequence[ImportedSequence]) -> str | None:
    tables = [shard.table.select(["sequence_index", "logprob"]) for shard in writer.shards()]
    index = np.concatenate([table["sequence_index"].to_numpy() for table in tables])
    logprob = np.concatenate([table["logprob"].to_numpy() for table in tables])
    lengths = [len(sequence.logprobs) for sequence in given]
    indices = np.array([sequence.sequence_index for sequence in given])
    shift = found_shift(
        np.concatenate([sequence.logprobs for sequence in given]),
        logprob[np.isin(index, indices)].astype(np.float64),
        np.repeat(indices, lengths),
        np.concatenate([np.arange(length) for length in lengths]),
    )
    if shift is None:
        return None
    words = shift.words("the import", "the record run")
    return f"{words[0].upper()}{words[1:]}."
