"""`trace-audit selftest`: plant faults, and see whether the tool finds them."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trace_audit.errors import ConfigError, TraceAuditError, UsageError

if TYPE_CHECKING:
    from trace_audit.config import EngineConfig
    from trace_audit.jobs import Job
    from trace_audit.runner import Target
    from trace_audit.selftest.answer import Answer
    from trace_audit.selftest.finding import Finding

# The controls' expectations hold for float32 on one rank, decoded: where and on what is free.
_KEYS = ("engine.device", "engine.attention_backend", "engine.num_threads")


@click.command()
@click.option(
    "--model",
    default="demo",
    show_default=True,
    metavar="MODEL",
    help="A model directory, a hub id, or demo.",
)
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change device, attention_backend or num_threads of every run.",
)
@click.option(
    "--keep",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Make the audit in this new directory and leave it there.",
)
def selftest(model: str, sets: tuple[str, ...], keep: Path | None) -> int:
    """Plant faults and see whether the tool finds them.

    Records a trace in float32, replays it with a known fault at a time, and compares as `diff
    report` does. Prints a line a control: ok, FAILED or reported, its name, what was planted, what
    must come of it, and what the tool said, split by tabs. The exit code is 1 if a control failed:
    then no verdict from this machine can be trusted. Takes minutes on a CPU.
    """
    from trace_audit.cli.messages import say
    from trace_audit.selftest.bench import Bench
    from trace_audit.selftest.controls import CONTROLS

    engine = _engine(sets)
    with _directory(keep) as directory:
        bench = Bench(directory, model=model, engine=engine, run=_run, ask=ask_report)
        bench.record()
        failed = 0
        for control in CONTROLS:
            finding = control(bench)
            click.echo(finding_line(finding))
            failed += finding.holds is False
    if failed:
        say(f"{failed} of the controls failed: no verdict from this machine can be trusted")
    return 1 if failed else 0


def finding_line(finding: Finding) -> str:
    """Outcome, control, planted, expected and said, split by tabs."""
    from trace_audit.cli.messages import printable

    fields = (
        finding.outcome,
        finding.control,
        finding.planted,
        finding.expected,
        finding.said,
    )
    return "\t".join(printable(field) for field in fields)


def ask_report(arguments: Sequence[str]) -> Answer:
    """What `diff report` with these arguments says: the command itself, but for its printing."""
    from trace_audit.cli.diff import report
    from trace_audit.selftest.answer import Answer

    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            code = report.main(list(arguments), prog_name="diff report", standalone_mode=False)
    except TraceAuditError as error:
        return Answer(exit_code=error.exit_code, report=None, message=error.message)
    return Answer(exit_code=code, report=json.loads(output.getvalue()))


def _run(job: Job, target: Target | None) -> object:
    from trace_audit.cli.execute import job_name
    from trace_audit.cli.progress import progress_of
    from trace_audit.runner import run_job

    with progress_of(job_name(job)) as on_event:
        return run_job(job, on_event, target=target)


def _engine(sets: tuple[str, ...]) -> EngineConfig:
    from trace_audit.config import default_record_config, override, parse_set

    combinations = parse_set(sets)
    if len(combinations) > 1:
        raise UsageError("--set gives several values to a key, and every run has the same ones")
    other = sorted(set(combinations[0]) - set(_KEYS))
    if other:
        raise ConfigError(
            f"selftest does not change {other[0]}: what its controls expect holds for float32, "
            "decoded on one rank",
            hint=f"it takes {', '.join(_KEYS)}",
        )
    return override(default_record_config(), combinations[0]).engine


@contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    """Where the audit is made: removed afterwards, unless it is to be kept."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="trace-audit-selftest-") as directory:
            yield Path(directory)
        return
    try:
        keep.mkdir(parents=True)
    except FileExistsError as error:
        raise UsageError(f"{keep} exists already", hint="--keep names a new directory") from error
    except OSError as error:
        raise UsageError(f"{keep} cannot be made: {error.strerror or error}") from error
    try:
        yield keep
    except BaseException:
        # Without a trace there is nothing to keep, and the same command can be given again.
        if not (keep / "audit").exists():
            shutil.rmtree(keep)
        raise
