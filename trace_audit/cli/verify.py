"""`trace-audit verify`: whether an audit's files are what was written."""

from __future__ import annotations

from pathlib import Path

import click

EXIT_FAIL = 1


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
def verify(directory: Path) -> int:
    """Check the files of an audit against their checksums.

    DIRECTORY is an audit. Prints `ok`, or a line for everything that is wrong and exits 1.
    """
    from trace_audit.cli.messages import printable
    from trace_audit.storage.audit_dir import AuditDir

    audit = AuditDir.open(directory)
    problems = audit.verify()
    for problem in problems:
        click.echo(f"FAIL\t{printable(problem)}")
    if problems:
        return EXIT_FAIL
    runs = ", ".join(audit.run_names())
    click.echo(f"ok\t{audit.info.num_sequences} sequences, runs {printable(runs)}")
    return 0
