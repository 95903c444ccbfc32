"""`trace-audit ls`: what an audit holds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from trace_audit.storage.audit_dir import AuditDir

_HEADER = ("run", "dtype", "attention", "device", "sequences", "tokens", "tokens/s", "note")
_SETTINGS = ("dtype", "attention_backend", "device")  # of the header's columns 2 to 4


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="How it is written.",
)
def ls(directory: Path, output_format: str) -> None:
    """List the runs of an audit.

    DIRECTORY is an audit. Prints its trace, then a line a run, unfinished ones last.
    """
    from trace_audit.storage.audit_dir import AuditDir

    audit = AuditDir.open(directory)
    if output_format == "json":
        click.echo(json.dumps(_as_json(audit), indent=2, allow_nan=False))
    else:
        click.echo(_as_text(audit), nl=False)


def _as_json(audit: AuditDir) -> dict[str, Any]:
    from trace_audit.cli.unfinished import unfinished_runs

    return {
        "audit": dataclasses.asdict(audit.info),
        "runs": {name: audit.run_info(name) for name in audit.run_names()},
        **dataclasses.asdict(unfinished_runs(audit)),
    }


def _as_text(audit: AuditDir) -> str:
    from trace_audit.cli.messages import printable
    from trace_audit.cli.table import format_table
    from trace_audit.cli.unfinished import unfinished_runs

    info = audit.info
    lines = (
        f"model  {info.model}",
        f"trace  {info.num_sequences} sequences, {info.num_output_tokens} output tokens",
    )
    rows = [_row(name, audit.run_info(name)) for name in audit.run_names()]
    unfinished = unfinished_runs(audit)
    rows += [(name, *[""] * 6, "interrupted") for name in unfinished.interrupted]
    rows += [(name, *[""] * 6, "running") for name in unfinished.running]
    rows += [(name, *[""] * 6, "damaged: no run.json") for name in audit.damaged_run_names()]
    return "".join(f"{printable(line)}\n" for line in lines) + format_table(_HEADER, rows)


def _row(name: str, info: dict[str, Any]) -> tuple[str, ...]:
    from trace_audit.diff.identity import run_identity

    run = run_identity(name, info)
    counters = info.get("counters") or {}
    settings = (run.resolved.get(f"engine.{key}") for key in _SETTINGS)
    speed = "" if run.tokens_per_second is None else f"{run.tokens_per_second:.1f}"
    notes = []
    if run.subset is not None:
        notes.append("subset")
    if run.distribution is not None and not run.distribution.is_raw:
        notes.append(str(run.distribution))
    if info.get("repeat_of"):
        notes.append(f"repeats {info['repeat_of']}")
    counted = (counters.get("sequences"), counters.get("tokens"))
    cells = (name, *settings, *counted, speed, ", ".join(notes))
    return tuple("" if cell is None else str(cell) for cell in cells)
