"""What goes to standard error: one sentence, and a hint."""

from __future__ import annotations

import traceback

import click

from trace_audit.errors import TraceAuditError


def say(text: str) -> None:
    """Print a line to standard error, harmless to a terminal whatever it contains."""
    click.echo(printable(text), err=True)


def print_traceback(error: BaseException) -> None:
    """Print where an error came from, in its run's own process too."""
    click.echo("".join(traceback.format_exception(error)), err=True, nl=False)


def print_error(error: TraceAuditError) -> None:
    """Print an error's sentence and hint."""
    say(f"error: {_ended(error.message)}")
    if error.hint is not None:
        say(f"hint: {_ended(error.hint)}")


def printable(text: str) -> str:
    """`text` with control, bidi, surrogate and other invisible characters as escapes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _ended(sentence: str) -> str:
    return sentence if sentence.endswith((".", "?", "!")) else f"{sentence}."
