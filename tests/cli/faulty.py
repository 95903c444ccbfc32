"""Commands that end in every way a command can, for the tests of the one place that catches."""

from __future__ import annotations

import errno
import os
import signal

import click

from trace_audit.errors import (
    AuditDirError,
    ConfigError,
    InvalidComparisonError,
    RunFailedError,
    TraceAuditError,
)

ERRORS: dict[str, BaseException] = {
    "config": ConfigError("the key \x1b[31mred\x1b[0m is wrong", hint="use another"),
    "audit": AuditDirError("no audit there"),
    "invalid": InvalidComparisonError("the runs cannot be compared"),
    "failed": RunFailedError("the run failed"),
    "bug": ZeroDivisionError("division\nby zero"),
    "full": OSError(errno.ENOSPC, "No space left on device", "audit.json"),
    "interrupt": KeyboardInterrupt(),
    "pipe": BrokenPipeError(),
    "exit": click.exceptions.Exit(3),
}


@click.command()
@click.argument("kind")
def faulty(kind: str) -> int:
    """End with an error, a signal or an exit code."""
    if kind == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
    if kind in ERRORS:
        error = ERRORS[kind]
        if isinstance(error, TraceAuditError):
            error.add_note("a note for --debug")
        raise error
    return int(kind)
