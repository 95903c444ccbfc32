"""A run whose ranks are all started here."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trace_audit.config import ParallelConfig
from trace_audit.jobs import Job, Rendezvous
from trace_audit.runner import child
from trace_audit.runner.child import Emit, Lead, Serve, ServerTarget, Target, Task
from trace_audit.runner.processes import running
from trace_audit.runner.supervision import Supervision


def run_job(
    job: Job, on_event: Emit, *, target: Target | None = None, server: ServerTarget | None = None
) -> dict[str, Any]:
    """Run a job in new processes, one a rank, and wait for its result.

    Args:
        on_event: called here, in order, with every stage, progress and message of the run.
        target: what the process with the job runs, None for `trace_audit.audit.execute`. It is
            pickled by name.
        server: what the other ranks' processes run, None for `trace_audit.audit.serve`.

    Returns:
        The result the job gave.

    Raises:
        TraceAuditError: the error that the run raised, of its own type, with its traceback as a
            note; it names the rank where there are several. RunFailedError if a process died
            without saying why, or did not answer the others.
    """
    target, server = target or child.execute_audit, server or child.serve_audit
    parallel, device = job.config.parallel, job.config.engine.device
    with _meeting_of(parallel) as ranks:
        tasks: list[Task] = [Lead(job=job, rendezvous=ranks[0], target=target)]
        tasks += [
            Serve(device=device, rendezvous=rank, target=server)
            for rank in ranks[1:]
            if rank is not None
        ]
        with running(tasks) as processes:
            return Supervision(
                processes,
                on_event,
                world_size=len(ranks),
                timeout_seconds=parallel.timeout_seconds,
            ).result()


@contextmanager
def _meeting_of(parallel: ParallelConfig) -> Iterator[list[Rendezvous | None]]:
    """Where the ranks of one run meet, which no other run can name; [None] if they do not."""
    if not parallel.uses_process_group:
        yield [None]
        return
    directory = tempfile.mkdtemp(prefix="trace-audit-")
    try:
        yield [
            Rendezvous(
                rank=rank,
                world_size=parallel.num_processes,
                local_rank=rank,
                local_world_size=parallel.num_processes,
                store=(Path(directory) / "store").as_uri(),
                key="run",
                timeout_seconds=parallel.timeout_seconds,
            )
            for rank in range(parallel.num_processes)
        ]
    finally:
        shutil.rmtree(directory)
