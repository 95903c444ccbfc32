"""Where a command's result goes: a file that was named, or standard output."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from trace_audit.errors import UsageError


def emit(text: str, output: Path | None) -> None:
    """Write `text` to the file, or to standard output where there is none.

    Raises:
        UsageError: the file cannot be written.
    """
    if output is None:
        # A stream in a narrow encoding shows escapes rather than failing on a token's text.
        encoding = sys.stdout.encoding or "utf-8"
        click.echo(text.encode(encoding, "backslashreplace").decode(encoding), nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{output} cannot be written: {error.strerror or error}.",
            hint="Give a file in a directory that exists and can be written to.",
        ) from error
