"""The command line's entry, and the one place that catches errors.

Nothing heavy is imported here: `--help` answers before a user notices.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

import click

from trace_audit import __version__
from trace_audit.cli.lazy import LazyCommand, LazyGroup
from trace_audit.cli.messages import print_error, print_traceback, say
from trace_audit.errors import TraceAuditError, UsageError

PROGRAM = "trace-audit"
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_CLOSED_PIPE = 128 + signal.SIGPIPE
EXIT_TERMINATED = 128 + signal.SIGTERM


def _command(name: str, short_help: str) -> LazyCommand:
    return LazyCommand(module=f"trace_audit.cli.{name}", attribute=name, short_help=short_help)


COMMANDS = {
    "record": _command("record", "Record a token trace and its reference logprobs."),
    "replay": _command("replay", "Replay a trace under other configurations."),
    "diff": _command("diff", "Compare runs of one audit token by token."),
    "gate": _command("gate", "Make a profile of gates for `diff report`."),
    "explain": _command("explain", "Explain a metric: formula, unit, when it is valid, source."),
    "ls": _command("ls", "List the runs of an audit."),
    "verify": _command("verify", "Check the files of an audit against their checksums."),
    "selftest": _command("selftest", "Plant faults and see whether the tool finds them."),
    "env": _command("env", "Show what the machine and the libraries are."),
}


@click.group(
    cls=LazyGroup, lazy_commands=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, prog_name=PROGRAM)
@click.option(
    "--debug", is_flag=True, envvar="TRACE_AUDIT_DEBUG", help="Show the traceback of an error."
)
def cli(debug: bool) -> None:
    """Record a token trace once, replay it under other numerics, diff per token.

    Exit codes: 0 pass, 1 fail, 2 usage or configuration error, 3 inconclusive, 4 invalid
    comparison, 70 the run failed, 130 and 143 interrupted.
    """


class Terminated(BaseException):
    """SIGTERM arrived. Not an Exception, so that only the catch site takes it."""


def main() -> NoReturn:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


def run(args: Sequence[str]) -> int:
    """Run a command line and return its exit code. The one place that catches errors."""
    context: click.Context | None = None
    try:
        with _sigterm_raises():
            context = cli.make_context(PROGRAM, list(args))
            with context:
                result = cli.invoke(context)
            sys.stdout.flush()
            return result if isinstance(result, int) else 0
    except (Exception, KeyboardInterrupt, Terminated) as error:
        return _report(error, debug=context is not None and context.params["debug"])


def _report(error: BaseException, *, debug: bool) -> int:
    """Tell the user what ended the command, and return the exit code that says it."""
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        # Its message is the help page, which is to be read as it is.
        click.echo(error.format_message(), err=True)
        return error.exit_code
    if isinstance(error, BrokenPipeError):
        _discard_output()
        return EXIT_CLOSED_PIPE
    if isinstance(error, KeyboardInterrupt | click.Abort):
        say("interrupted")
        return EXIT_INTERRUPTED
    if isinstance(error, Terminated):
        say("terminated")
        return EXIT_TERMINATED
    assert isinstance(error, Exception)
    if debug:
        print_traceback(error)
    typed = _typed(error)
    print_error(typed)
    return typed.exit_code


def _typed(error: Exception) -> TraceAuditError:
    if isinstance(error, click.ClickException):
        message = error.format_message().strip().rstrip(".")
        context = getattr(error, "ctx", None)
        path = PROGRAM if context is None else context.command_path
        return UsageError(message, hint=f"{path} --help shows what is valid")
    # Imported late: it needs multiprocessing, and most commands end well.
    from trace_audit.runner import as_trace_audit_error

    return as_trace_audit_error(error)


def _discard_output() -> None:
    """The reader of standard output went away; what is still buffered has nowhere to go."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Make SIGTERM unwind the stack, so that a run's process is ended with this one."""

    def handler(number: int, frame: FrameType | None) -> NoReturn:
        raise Terminated

    previous = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
