"""Which part a command has among the commands of joined ranks: all of the work, or serving."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeAlias

from trace_audit.cli.messages import say
from trace_audit.cli.progress import plain_lines
from trace_audit.errors import RunFailedError
from trace_audit.jobs import Event, Job
from trace_audit.runner import as_trace_audit_error, run_job
from trace_audit.runner.place import Place, place_of

RunJob: TypeAlias = Callable[[Job, Callable[[Event], None]], dict[str, Any]]


def as_rank(command: Callable[[RunJob], int]) -> int:
    """Do the work of a command, or serve the one that does.

    Where RANK and WORLD_SIZE say that this process is one of several, rank 0 does it and every
    other rank serves in its runs, whatever its arguments say.

    Args:
        command: the work, given what runs one job. It is called on rank 0 alone.

    Returns:
        The exit code.

    Raises:
        ConfigError: RANK, WORLD_SIZE and their like make no sense.
        TraceAuditError: what the work raised, on rank 0 or because of another.
    """
    place = place_of(os.environ)
    if place is None:
        return command(run_job)
    if place.world_size == 1:
        return command(_checked(place))
    place.check_host()
    if place.rank > 0:
        return _serve(place)
    say(f"{place.name}: the others join at {place.address}")
    return _lead(place, command)


def _checked(place: Place) -> RunJob:
    def run(job: Job, on_event: Callable[[Event], None]) -> dict[str, Any]:
        place.check(job.config.parallel)
        return run_job(job, on_event)

    return run


def _serve(place: Place) -> int:
    from trace_audit.runner.service import Service

    return Service(place, plain_lines(place.name)).run()


def _lead(place: Place, command: Callable[[RunJob], int]) -> int:
    from trace_audit.runner.leadership import Leadership

    leadership = Leadership(place)
    try:
        code = command(leadership.run_job)
    except Exception as error:
        typed = as_trace_audit_error(error)
        leadership.end(typed.exit_code, typed)
        raise
    except BaseException:
        gone = RunFailedError(f"the command of rank 0 of {place.world_size} was ended")
        leadership.end(gone.exit_code, gone)
        raise
    leadership.end(code, None)
    return code
