"""Runs jobs one after the other, and prints a line for each that is finished."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from trace_audit.cli.messages import print_error, print_traceback, printable, say
from trace_audit.cli.progress import progress_of
from trace_audit.cli.ranks import RunJob
from trace_audit.errors import TraceAuditError
from trace_audit.jobs import Job, RecordJob
from trace_audit.text import plural


def execute_all(jobs: Sequence[Job], *, keep_going: bool, debug: bool, run: RunJob) -> int:
    """Run every job in a process of its own.

    Args:
        keep_going: go on after a failed run.
        debug: show tracebacks of runs that failed.
        run: what runs one job.

    Returns:
        The worst exit code, 0 if every run finished.

    Raises:
        TraceAuditError: a run failed and `keep_going` is false.
    """
    worst = 0
    for job in jobs:
        try:
            _execute(job, run)
        except TraceAuditError as error:
            if not keep_going:
                raise
            say(f"{job_name(job)} failed:")
            if debug:
                print_traceback(error)
            print_error(error)
            worst = max(worst, error.exit_code)
    return worst


def job_name(job: Job) -> str:
    """The name of the run that a job makes."""
    return "record" if isinstance(job, RecordJob) else job.run_name


def _execute(job: Job, run: RunJob) -> None:
    try:
        with progress_of(job_name(job)) as on_event:
            result = run(job, on_event)
    except TraceAuditError:
        raise
    except BaseException:
        say(f"{job_name(job)}: unfinished; the same command goes on from finished shards, if any")
        raise
    if result["resumed_shards"]:
        shards = plural(result["resumed_shards"], "finished shard")
        say(f"{job_name(job)}: went on from {shards}")
    click.echo(result_line(result))


def result_line(result: dict[str, Any]) -> str:
    """Name, sequences, tokens, tokens/s and path of a finished run, split by tabs."""
    fields = (
        result["run"],
        result["sequences"],
        result["tokens"],
        f"{result['tokens_per_second']:.1f}",
        result["path"],
    )
    return "\t".join(printable(str(field)) for field in fields)
