"""What the tests of several ranks run in the children. Imported there by name, so kept light."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from trace_audit.errors import ConfigError, InvalidComparisonError
from trace_audit.jobs import Event, Job, Message, Progress, Rendezvous, Stage

Emit = Callable[[Event], None]


def total(rank: int) -> int:
    """Sum a number over all ranks."""
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([10**rank])
    dist.all_reduce(tensor)
    return int(tensor.item())


def wait_for_all() -> None:
    """Wait for every other rank to do so."""
    import torch.distributed as dist

    dist.barrier()


def lead_total(job: Job, emit: Emit, rendezvous: Rendezvous | None) -> dict[str, Any]:
    """Tell of every kind of event, and add up with the others."""
    assert rendezvous is not None
    emit(Stage("adding"))
    emit(Progress(1, 2))
    emit(Message("watch out"))
    result = total(rendezvous.rank)
    return finished(job, total=result, rendezvous=rendezvous, environment=environment())


def serve_total(rendezvous: Rendezvous, emit: Emit) -> dict[str, Any]:
    """Add up with the others; stages and progress of this rank are nobody's business."""
    emit(Stage("serving"))
    emit(Progress(1, 1))
    if rendezvous.rank == 1:
        emit(Message(f"{total(rendezvous.rank)} {sorted(environment().items())}"))
    else:
        total(rendezvous.rank)
    print("noise of a library", flush=True)
    return {}


def environment() -> dict[str, str | None]:
    """What had to be set before anything was imported."""
    return {name: os.environ.get(name) for name in ("TRITON_INTERPRET", "CUBLAS_WORKSPACE_CONFIG")}


def finished(job: Job, **more: Any) -> dict[str, Any]:
    """A result as a command prints it, and more."""
    name = getattr(job, "run_name", "record")
    facts = {"run": name, "sequences": 1, "tokens": 2, "tokens_per_second": 3.0, "path": "there"}
    return {**facts, "resumed_shards": 0, **more}


def lead_and_wait(job: Job, emit: Emit, rendezvous: Rendezvous | None) -> dict[str, Any]:
    """Tell this process's id, then wait for the others, who are not going to come."""
    tell_pids(emit)
    wait_for_all()
    return finished(job)


def lead_wrongly(job: Job, emit: Emit, rendezvous: Rendezvous | None) -> dict[str, Any]:
    """Refuse before the others are needed."""
    raise ConfigError("the key is wrong", hint="use another")


def tell_pids(emit: Emit) -> None:
    """Start a process, and tell its id and this one's."""
    helper = subprocess.Popen(
        ["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    emit(Message(f"pids {os.getpid()} {helper.pid}"))


def serve_and_refuse(rendezvous: Rendezvous, emit: Emit) -> dict[str, Any]:
    """Rank 1 raises a typed error, while the others wait for it."""
    _leave_others_waiting(rendezvous, emit)
    raise InvalidComparisonError("these do not compare", hint="take others")


def serve_and_refuse_the_same(rendezvous: Rendezvous, emit: Emit) -> dict[str, Any]:
    """Raise what `lead_wrongly` does."""
    raise ConfigError("the key is wrong", hint="use another")


def serve_and_break(rendezvous: Rendezvous, emit: Emit) -> dict[str, Any]:
    """Rank 1 raises what nobody planned, while the others wait for it."""
    _leave_others_waiting(rendezvous, emit)
    raise ZeroDivisionError("first line\nsecond line")


def serve_and_die(rendezvous: Rendezvous, emit: Emit) -> dict[str, Any]:
    """Rank 1 is killed, while the others wait for it."""
    _leave_others_waiting(rendezvous, emit)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def serve_and_leave(rendezvous: Rendezvous, emit: Emit) -> dict[str, Any]:
    """Rank 1 ends without a word, while the others wait for it."""
    _leave_others_waiting(rendezvous, emit)
    os._exit(0)


def serve_and_stop(rendezvous: Rendezvous, emit: Emit) -> dict[str, Any]:
    """Rank 1 neither runs nor ends, while the others wait for it."""
    _leave_others_waiting(rendezvous, emit)
    os.kill(os.getpid(), signal.SIGSTOP)
    raise AssertionError


def serve_and_wait(rendezvous: Rendezvous, emit: Emit) -> dict[str, Any]:
    """Wait for rank 0."""
    tell_pids(emit)
    wait_for_all()
    return {}


def serve_and_wait_for_ever(rendezvous: Rendezvous, emit: Emit) -> dict[str, Any]:
    """Never be ready."""
    tell_pids(emit)
    while True:
        signal.pause()


def serve_and_linger(rendezvous: Rendezvous, emit: Emit) -> dict[str, Any]:
    """Add up with the others, then do not end."""
    tell_pids(emit)
    total(rendezvous.rank)
    signal.pause()
    raise AssertionError


def serve_and_fail_at_the_end(rendezvous: Rendezvous, emit: Emit) -> dict[str, Any]:
    """Add up with the others, then fail."""
    total(rendezvous.rank)
    raise ConfigError("too late")


def lead_deaf(job: Job, emit: Emit, rendezvous: Rendezvous | None) -> dict[str, Any]:
    """Ignore requests to end, and wait for ever."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tell_pids(emit)
    while True:
        signal.pause()


def serve_deaf(rendezvous: Rendezvous, emit: Emit) -> dict[str, Any]:
    """Ignore requests to end, and wait for ever."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tell_pids(emit)
    while True:
        signal.pause()


def lead_without_torch(job: Job, emit: Emit, rendezvous: Rendezvous | None) -> dict[str, Any]:
    """Tell whether there was a rendezvous, and whether torch was needed for it."""
    return finished(job, rendezvous=rendezvous, torch_is_loaded="torch" in sys.modules)


def _leave_others_waiting(rendezvous: Rendezvous, emit: Emit) -> None:
    tell_pids(emit)
    if rendezvous.rank != 1:
        wait_for_all()
