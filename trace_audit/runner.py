"""Runs a job in a process of its own, and leaves none behind.

Interpreter, precision and thread settings are process-wide, so every run gets a fresh spawned
process. The child leads its own process group: what it starts ends with it. It ends when this
process ends, however that happens, and this process learns from the child's pipe when it died.
"""

from __future__ import annotations

import errno
import glob
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, TypeAlias

from trace_audit.errors import RunFailedError, TraceAuditError
from trace_audit.jobs import Done, Event, Failed, Job

Emit: TypeAlias = Callable[[Event], None]
Target: TypeAlias = Callable[[Job, Emit], dict[str, Any]]

GRACE_SECONDS = 3.0  # between asking a process to end and ending it


def run_job(job: Job, on_event: Emit, *, target: Target | None = None) -> dict[str, Any]:
    """Run a job in a new process and wait for its result.

    Args:
        on_event: called here, in order, with every stage, progress and message of the run.
        target: what the process runs, None for `trace_audit.audit.execute`. It is pickled by name.

    Returns:
        The result the job gave.

    Raises:
        TraceAuditError: the error that the run raised, of its own type, with its traceback as a
            note. RunFailedError if the process died without saying why.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=_child_main, args=(job, target or execute_audit, sender), name="trace-audit-run"
    )
    try:
        _start(process)
        # The child's copy is then the only one, and reading ends when the child does.
        sender.close()
        ending = _follow(receiver, on_event)
    except BaseException:
        # An interrupt, or a reader of events that failed: the run is not wanted any more.
        _signal_group(process, signal.SIGTERM)
        raise
    finally:
        _reap(process)
        receiver.close()
    if isinstance(ending, Done):
        return ending.result
    if isinstance(ending, Failed):
        ending.error.add_note(ending.traceback)
        raise ending.error
    raise _died(process.exitcode)


def execute_audit(job: Job, emit: Emit) -> dict[str, Any]:
    """Record or replay: the default target, which is the only one that needs torch."""
    from trace_audit.audit import execute

    return execute(job, emit)


def runs_on_cpu(device: str) -> bool:
    """Whether a run with this `engine.device` will compute on the CPU, told without torch."""
    if device != "auto":
        return device == "cpu"
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return True
    return not glob.glob("/dev/nvidia[0-9]*") and shutil.which("nvidia-smi") is None


def _follow(receiver: Connection, on_event: Emit) -> Done | Failed | None:
    """Pass events on until the last one; None if the child died before it sent that."""
    while True:
        try:
            event: Event = receiver.recv()
        except (EOFError, OSError):
            # OSError: it died within a message.
            return None
        if isinstance(event, Done | Failed):
            return event
        on_event(event)


def _start(process: SpawnProcess) -> None:
    # A terminal's Ctrl-C reaches the child too until it has left this group; it would print a
    # traceback of its own. Blocked signals stay blocked in the child, and wait for us here.
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _reap(process: SpawnProcess) -> None:
    """Wait for the child in bounded time, and leave nothing of its group."""
    if process.pid is None:
        return
    wait([process.sentinel], timeout=GRACE_SECONDS)
    # Before the child is reaped its id cannot belong to anyone else.
    _signal_group(process, signal.SIGKILL)
    process.join()


def _signal_group(process: SpawnProcess, number: signal.Signals) -> None:
    if process.pid is None:
        return
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        # No group yet: the child was signalled before it made one. macOS says EPERM of zombies.
        os.kill(process.pid, number)


def _died(exit_code: int | None) -> RunFailedError:
    if exit_code is not None and exit_code < 0:
        name = signal.Signals(-exit_code).name
        hint = None
        if -exit_code == signal.SIGKILL:
            hint = "the system does this when memory runs out; lower max_num_seqs or num_kv_blocks"
        return RunFailedError(f"the run's process was killed by {name}", hint=hint)
    return RunFailedError(f"the run's process ended with exit code {exit_code} and no result")


def _child_main(job: Job, target: Target, sender: Connection) -> None:
    # First: Triton reads this when it is imported, and a target may import it at once.
    if runs_on_cpu(job.config.engine.device):
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        # cuBLAS may choose its workspace, and with it the order of sums, anew on every start.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.setpgid(0, 0)
    # A terminal's Ctrl-C is the parent's to handle, which then ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Standard output is the command's data; what a library prints goes with the messages.
    os.dup2(sys.stderr.fileno(), 1)
    try:
        result = target(job, sender.send)
    except Exception as error:
        sender.send(Failed(as_trace_audit_error(error), traceback.format_exc()))
    else:
        sender.send(Done(result))
    sender.close()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


def as_trace_audit_error(error: Exception) -> TraceAuditError:
    """The typed error to show for any exception: one sentence, exit code 70 unless typed."""
    if isinstance(error, TraceAuditError):
        return error
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" while writing {error.filename}" if error.filename else ""
        return RunFailedError(
            f"the disk is full{where}", hint="free some space and run again: finished work is kept"
        )
    if _is_out_of_memory(error):
        return RunFailedError(
            f"memory ran out: {_first_line(error)}", hint="lower max_num_seqs or num_kv_blocks"
        )
    return RunFailedError(
        f"an unexpected error ended the command: {type(error).__name__}: {_first_line(error)}",
        hint="TRACE_AUDIT_DEBUG=1 shows the traceback; please report it",
    )


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    # torch has a type of its own for CUDA only.
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"
