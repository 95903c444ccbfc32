"""record() and replay(): the only bridge between the engine and the files."""

from __future__ import annotations

from typing import Any

from trace_audit.jobs import Job, RecordJob
from trace_audit.recording import record
from trace_audit.replaying import replay
from trace_audit.shard_loop import Emit

__all__ = ["execute", "record", "replay"]


def execute(job: Job, emit: Emit) -> dict[str, Any]:
    """Run a job in this process; what a run's child process calls.

    Args:
        job: what to do.
        emit: told of stages, progress and messages.

    Returns:
        run, path, sequences, tokens, tokens_per_second, resumed_shards.

    Raises:
        TraceAuditError: the job is wrong, or it could not be finished.
    """
    return record(job, emit) if isinstance(job, RecordJob) else replay(job, emit)
