"""What a failed run says: any exception as one sentence, and of several ranks' the cause."""

from __future__ import annotations

import errno
import re
import signal
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from trace_audit.errors import RunFailedError, TraceAuditError
from trace_audit.jobs import Done, Failed, FailureKind


@dataclass(frozen=True)
class Died:
    """A rank's process ended without a word."""

    exit_code: int | None


Ending: TypeAlias = Done | Failed | Died

_NAMED_COMMUNICATION_ERRORS = {"DistError", "DistBackendError"}  # by name: torch is not loaded here
_GLOO = re.compile(r"\bgloo\b|\AWait timeout\Z", re.IGNORECASE)
_TIMED_OUT = re.compile(r"time(d |-)?\s?out", re.IGNORECASE)
_MEMORY_HINT = 'lower max_num_seqs or num_kv_blocks; with path = "prefill" set prefill_chunk'


def failure_of(error: Exception) -> Failed:
    """What a rank tells of the exception that ended it, from within its handler."""
    return Failed(as_trace_audit_error(error), traceback.format_exc(), _kind_of(error))


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
        return RunFailedError(f"memory ran out: {_first_line(error)}", hint=_MEMORY_HINT)
    if _is_of_communication(error):
        return RunFailedError(f"the ranks could not talk: {_in_one_line(error)}")
    return RunFailedError(
        f"an unexpected error ended the command: {type(error).__name__}: {_first_line(error)}",
        hint="TRACE_AUDIT_DEBUG=1 shows the traceback; please report it",
    )


def raised(failure: Failed) -> TraceAuditError:
    """The error of a rank as this process raises it, with the rank's traceback as a note."""
    failure.error.add_note(failure.traceback)
    return failure.error


def error_of_death(death: Died) -> RunFailedError:
    """What to say of a process that ended without a word."""
    code = death.exit_code
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = None
        if -code == signal.SIGKILL:
            hint = f"the system does this when memory runs out; {_MEMORY_HINT}"
        return RunFailedError(f"the run's process was killed by {name}", hint=hint)
    return RunFailedError(f"the run's process ended with exit code {code} and no result")


def cause(
    endings: Mapping[int, Ending], *, world_size: int, timeout_seconds: int
) -> TraceAuditError:
    """The error that ended a run of several ranks, told from what only followed from it.

    Args:
        endings: how each rank ended, in the order they were heard of; ranks that were not heard
            of are missing. At least one of them failed or died.
    """
    failed = {rank: ending for rank, ending in endings.items() if not isinstance(ending, Done)}
    rank = min(failed, key=lambda rank: _weight(failed[rank]))
    first = failed[rank]
    error = raised(first) if isinstance(first, Failed) else error_of_death(first)
    if isinstance(first, Failed) and is_consequence(first):
        silent = [other for other in range(world_size) if other not in endings]
        if silent:
            return _silence(silent, first, world_size, timeout_seconds)
    if isinstance(first, Died) and _is_abort(first) and world_size > 1:
        error.hint = "NCCL does this when another rank is lost, or silent for timeout_seconds"
    if world_size == 1 or _all_say(error, failed, world_size):
        return error
    return naming_rank(error, rank, world_size)


def naming_rank(error: TraceAuditError, rank: int, world_size: int) -> TraceAuditError:
    """The same error, its message led by the rank that it is of."""
    named = type(error)(f"rank {rank} of {world_size}: {error.message}", hint=error.hint)
    for note in getattr(error, "__notes__", []):
        named.add_note(note)
    return named


def is_decisive(ending: Ending) -> bool:
    """Whether no other rank's ending could be the cause of this one."""
    return _weight(ending) == 0


def is_consequence(ending: Ending) -> bool:
    """Whether it only tells that another rank was lost, or did not answer."""
    return isinstance(ending, Failed) and ending.kind in ("connection", "timeout")


def _weight(ending: Ending) -> int:
    """Causes first, consequences last."""
    if isinstance(ending, Died):
        return 3 if _is_abort(ending) else 0
    assert isinstance(ending, Failed)
    # A connection is lost because a rank ended, which one that waited too long does.
    weights: dict[FailureKind, int] = {"typed": 1, "unexpected": 2, "timeout": 4, "connection": 5}
    return weights[ending.kind]


def _is_abort(death: Died) -> bool:
    """Whether it may be NCCL's watchdog that ended the process, because of another rank."""
    return death.exit_code == -signal.SIGABRT


def _silence(
    silent: list[int], first: Failed, world_size: int, timeout_seconds: int
) -> TraceAuditError:
    ranks = "rank" if len(silent) == 1 else "ranks"
    who = f"{ranks} {', '.join(map(str, silent))} of {world_size}"
    if first.kind == "timeout":
        hint = "raise parallel.timeout_seconds if the rank was only slow"
        error = RunFailedError(f"{who} did not answer for {timeout_seconds} s", hint=hint)
    else:
        error = RunFailedError(f"the connection to {who} was lost")
    error.add_note(first.traceback)
    return error


def _all_say(error: TraceAuditError, failed: Mapping[int, Ending], world_size: int) -> bool:
    """Whether every rank refused in the same words: then it is the run's error, not a rank's."""
    return len(failed) == world_size and all(
        isinstance(ending, Failed) and ending.error.message == error.message
        for ending in failed.values()
    )


def _kind_of(error: BaseException) -> FailureKind:
    """A typed error raised `from` a communication error is one."""
    link: BaseException | None = error
    while link is not None:
        if _is_of_communication(link):
            return "timeout" if _TIMED_OUT.search(str(link)) else "connection"
        link = link.__cause__
    return "typed" if isinstance(error, TraceAuditError) else "unexpected"


def _is_of_communication(error: BaseException) -> bool:
    names = {base.__name__ for base in type(error).__mro__}
    if names & _NAMED_COMMUNICATION_ERRORS:
        return True
    # gloo's have no type of their own.
    return type(error) is RuntimeError and _GLOO.search(str(error)) is not None


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    # torch has a type of its own for CUDA only.
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"


def _in_one_line(error: Exception) -> str:
    """NCCL says on its last line what was wrong, and torch adds frames of its own after it."""
    lines = (line.strip() for line in str(error).splitlines())
    kept = [line for line in lines if line and not line.startswith("<")]
    return " ".join(kept) if kept else "no message"
