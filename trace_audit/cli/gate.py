"""`trace-audit gate`: bounds of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trace_audit.cli.messages import say
from trace_audit.cli.output import emit
from trace_audit.errors import UsageError

if TYPE_CHECKING:
    from trace_audit.diff.profiles import Profile
    from trace_audit.diff.source import AuditSource

_PATH = click.Path(path_type=Path)


@click.group()
def gate() -> None:
    """Make a profile of gates for `diff report`."""


@gate.command()
@click.argument("directory", type=_PATH)
@click.option("-o", "--output", required=True, type=_PATH, metavar="FILE", help="TOML to write.")
@click.option(
    "--baseline", default="record", show_default=True, metavar="RUN", help="Run to compare with."
)
@click.option(
    "--run",
    "runs",
    multiple=True,
    metavar="RUN",
    help="A good run; repeatable. Default: every complete run that repeats none.",
)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME",
    help="Metric to bound; repeatable. Default: those of the profiles, where there are.",
)
@click.option("--name", default="learned", show_default=True, help="The profile's name.")
@click.option("--force", is_flag=True, help="Replace FILE.")
def learn(
    directory: Path,
    output: Path,
    baseline: str,
    runs: tuple[str, ...],
    metrics: tuple[str, ...],
    name: str,
    force: bool,
) -> None:
    """Learn bounds from good runs, for `diff report --profile FILE`.

    DIRECTORY is an audit. Every bound is one that the good runs pass, and that one more like them
    is expected to. Prints a line a gate: metric and bound, split by a tab.
    """
    from trace_audit.diff.gate_expression import gated_metric
    from trace_audit.diff.learn import LEARNED
    from trace_audit.diff.profile_file import profile_text
    from trace_audit.diff.source import AuditSource
    from trace_audit.storage.audit_dir import AuditDir

    if output.exists() and not force:
        raise UsageError(f"{output} is already there.", hint="Replace it with --force.")
    wanted = tuple(dict.fromkeys(metrics or LEARNED))
    for metric in metrics:
        gated_metric(metric)
    source = AuditSource(AuditDir.open(directory))
    good = _good_runs(source, baseline, runs)
    _check_enough(good, baseline)
    profile = _learned(source, baseline, good, wanted, name)
    emit(profile_text(profile), output)
    for one in profile.gates:
        click.echo(f"{one.metric}\t{one.bound:g}")


def _learned(
    source: AuditSource, baseline: str, good: tuple[str, ...], metrics: tuple[str, ...], name: str
) -> Profile:
    from trace_audit.diff.learn import distinct_runs, learned_gates
    from trace_audit.diff.profiles import Profile
    from trace_audit.diff.report_plan import plan_report

    summary = plan_report(source, baseline, good).run()
    for bad in summary.invalid:
        raise UsageError(f"{bad.candidate} cannot be a good run: {bad.message}")
    pairs = [pair for pair in summary.pairs if not pair.bitwise]
    for pair in summary.pairs:
        if pair.bitwise:
            say(f"{pair.candidate.name} is left out: it equals {baseline} bit for bit")
    pairs, same = distinct_runs(pairs)
    for name_of_one, first in same.items():
        say(f"{name_of_one} is left out: its numbers are those of {first}, and no other run's")
    _check_enough([pair.candidate.name for pair in pairs], baseline)
    gates, missing = learned_gates(pairs, metrics)
    for metric, reason in missing.items():
        say(f"no bound on {metric}: {reason}")
    if not gates:
        raise UsageError("No metric gives a bound.", hint="Name others with --metric.")
    return Profile(
        name=name,
        purpose=f"learned from {len(pairs)} good runs of {summary.trace.model}",
        gates=gates,
        baseline=baseline,
        model_fingerprint=summary.trace.model_fingerprint,
        runs=tuple(pair.candidate.name for pair in pairs),
    )


def _good_runs(source: AuditSource, baseline: str, named: tuple[str, ...]) -> tuple[str, ...]:
    """Runs that were named, else all; a repeat of another one adds nothing."""
    names = named or tuple(n for n in source.audit.run_names() if n != baseline)
    good: dict[str, str] = {}
    for name in names:
        root = str(source.info(name).get("repeat_of") or name)
        if good.setdefault(root, name) != name:
            say(f"{name} is left out: it repeats {good[root]}")
    return tuple(good.values())


def _check_enough(good: Sequence[str], baseline: str) -> None:
    from trace_audit.diff.learn import MIN_RUNS

    if len(good) < MIN_RUNS:
        found = f"only {good[0]!r}" if good else "none"
        raise UsageError(
            f"Bounds need {MIN_RUNS} good runs other than {baseline!r}, and there is {found}.",
            hint="A repeat is no other run; replay other configurations that are known to be good.",
        )
