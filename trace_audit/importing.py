"""Logprobs that came with imported tokens become a run of their own."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from trace_audit.jobs import Message
from trace_audit.shard_loop import Emit
from trace_audit.storage.imported import ImportedSequence, imported_tokens, shift_warning
from trace_audit.storage.record_writer import RecordWriter


def add_imported(
    writer: RecordWriter,
    given: Sequence[ImportedSequence],
    num_sequences: int,
    vocabulary_size: int,
    emit: Emit,
) -> None:
    """Add the run `imported`, where any sequence came with logprobs.

    Args:
        writer: of the record; all its shards are finished.
        given: the sequences that did, in trace order.
        num_sequences: of the whole trace.
        vocabulary_size: of the model.
        emit: told if the logprobs look shifted against the recorded run's.
    """
    if not given:
        return
    columns = ["sequence_index", "step", "logprob"]
    recorded = pa.concat_tables(shard.table.select(columns) for shard in writer.shards())
    if (warning := shift_warning(given, recorded)) is not None:
        emit(Message(warning))
    writer.add_imported_run(
        imported_tokens(given),
        {
            "model": None,
            "vocabulary_size": vocabulary_size,
            "capabilities": {"logprob": "exact"},
            "subset": [s.sequence_id for s in given] if len(given) < num_sequences else None,
        },
    )
