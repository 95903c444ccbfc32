"""A replay with a planted fault: a layer's KV writes that get lost from one position on."""

from __future__ import annotations

from typing import Any

from trace_audit.jobs import Job, Rendezvous
from trace_audit.selftest.faults import replay_on


def replay_with_lost_writes(
    layer: int, first_position: int, job: Job, emit: Any, rendezvous: Rendezvous | None
) -> dict[str, Any]:
    """For `run_job`: a replay with the fault, in a process of its own."""
    # The run's process imports this module to find the function, before it knows its device;
    # kernels may only be imported once it does.
    from tests.lost_writes import lost_writes

    return replay_on(lost_writes(layer, first_position), job, emit, rendezvous)
