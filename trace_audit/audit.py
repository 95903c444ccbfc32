"""record() and replay(): the only bridge between the engine and the files."""

from __future__ import annotations

from typing import Any

from trace_audit.jobs import Job, RecordJob, Rendezvous
from trace_audit.ranks import serve_rank
from trace_audit.recording import record
from trace_audit.replaying import replay
from trace_audit.shard_loop import Emit

__all__ = ["execute", "record", "replay", "serve"]


def execute(job: Job, emit: Emit, rendezvous: Rendezvous | None = None) -> dict[str, Any]:
    """Run a job in this process: the only one of the run, or its rank 0.

    Args:
        job: what to do.
        emit: told of stages, progress and messages.
        rendezvous: how the ranks met, their process group being up; None without one.

    Returns:
        run, path, sequences, tokens, tokens_per_second, resumed_shards.

    Raises:
        TraceAuditError: the job is wrong, or it could not be finished.
    """
    if isinstance(job, RecordJob):
        return record(job, emit, rendezvous)
    return replay(job, emit, rendezvous)


def serve(rendezvous: Rendezvous, emit: Emit) -> dict[str, Any]:
    """Compute beside rank 0 until it is done: what every other rank of a run does.

    Args:
        rendezvous: how the ranks met; their process group is up.
        emit: told of messages.

    Raises:
        TraceAuditError: this rank cannot do its part.
    """
    return serve_rank(rendezvous)
