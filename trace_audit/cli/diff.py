"""`trace-audit diff`: compare runs token by token."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trace_audit.cli.messages import say
from trace_audit.cli.output import emit
from trace_audit.errors import UsageError

if TYPE_CHECKING:
    from trace_audit.diff.compare import Comparison
    from trace_audit.diff.exhibit import Exhibit
    from trace_audit.diff.report_plan import ReportPlan
    from trace_audit.diff.source import AuditSource
    from trace_audit.diff.summary import ReportSummary

_DIRECTORY = click.Path(path_type=Path)
_redact = click.option(
    "--redact",
    type=click.Choice(["text"]),
    help="Leave out the text of tokens and prompts; ids and numbers stay.",
)


@click.group()
def diff() -> None:
    """Compare runs of one audit token by token."""


@diff.command()
@click.argument("directory", type=_DIRECTORY)
@click.option(
    "--baseline",
    metavar="RUN",
    help="Run to compare with.  [default: record; imported with --profile rl]",
)
@click.option(
    "--candidate",
    "candidates",
    multiple=True,
    metavar="RUN",
    help="Run under test; repeatable. Default: every other complete run.",
)
@click.option(
    "--profile",
    metavar="NAME|FILE",
    help="Gate with a profile: bitwise, kernel, kv8, w8, w4, rl, or a TOML file.",
)
@click.option(
    "--fail-on",
    "expressions",
    multiple=True,
    metavar="EXPR",
    help="Gate a metric, as 'kl.mean > 3e-3' or 'abs.p99 > 3*floor'; repeatable.",
)
@click.option(
    "--inconclusive",
    type=click.Choice(["fail", "pass"]),
    help="What an inconclusive verdict counts as, instead of exit code 3.",
)
@click.option("--require-floor", is_flag=True, help="A gate without a measured floor is invalid.")
@click.option("--referee", metavar="RUN", help="Say which of the two sides is nearer to this run.")
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["terminal", "json", "markdown", "html", "junit"]),
    default="terminal",
    show_default=True,
    help="How the report is written.",
)
@click.option(
    "--max-chars",
    type=click.IntRange(min=1),
    metavar="N",
    help="Shorten Markdown to this, the worst tokens first and the verdict never.",
)
@click.option(
    "-o", "--output", type=_DIRECTORY, metavar="FILE", help="Write the report to this file."
)
@_redact
@click.option(
    "--html-sequences",
    type=click.IntRange(min=1),
    metavar="N",
    help="Sequences shown in HTML for each candidate.  [default: 8, fewer where there are many "
    "candidates]",
)
@click.option("--no-save", is_flag=True, help="Leave DIRECTORY/diffs alone.")
def report(
    directory: Path,
    baseline: str | None,
    candidates: tuple[str, ...],
    profile: str | None,
    expressions: tuple[str, ...],
    inconclusive: str | None,
    require_floor: bool,
    referee: str | None,
    output_format: str,
    max_chars: int | None,
    output: Path | None,
    redact: str | None,
    html_sequences: int | None,
    no_save: bool,
) -> int:
    """Report how runs differ, and save the per-token diffs in DIRECTORY/diffs.

    Delta is candidate minus baseline log-probability of the same token, in nats; positive means
    that the candidate is more confident. With --profile or --fail-on the exit code is the verdict:
    0 pass, 1 fail, 3 inconclusive, 4 invalid. Without, it is 0, or 4 if a run cannot be compared.
    """
    from trace_audit.cli.gating import (
        check_profile,
        chosen_baseline,
        chosen_profile,
        make_gating,
        tell,
    )
    from trace_audit.diff.gate import exit_code
    from trace_audit.diff.report_plan import plan_report

    if max_chars is not None and output_format != "markdown":
        raise UsageError("--max-chars shortens Markdown only.", hint="Add --format markdown.")
    if html_sequences is not None and output_format != "html":
        raise UsageError("--html-sequences has no effect without --format html.")
    gates = chosen_profile(profile)
    gating = make_gating(gates, expressions, inconclusive=inconclusive, require_floor=require_floor)
    source = _open(directory, redact)
    check_profile(source, gates)
    reference = chosen_baseline(source, baseline, gates)
    others = (n for n in source.audit.run_names() if n not in (reference, referee))
    names = candidates or tuple(others)
    if not candidates:
        for name in source.audit.damaged_run_names():
            say(f"warning: run {name} has no run.json and is left out: it is damaged")
    plan = plan_report(source, reference, tuple(dict.fromkeys(names)), gating, referee=referee)
    exhibits: list[Exhibit] = []

    def consume(comparison: Comparison) -> None:
        if not no_save:
            _save(directory, plan.empty, comparison)
        if output_format == "html":
            exhibits.append(_exhibit(plan, comparison, html_sequences))

    summary = plan.run(consume)
    if output_format == "html":
        from trace_audit.report.html import render_html

        emit(render_html(summary, exhibits), output)
    else:
        emit(_rendered(summary, output_format, output, max_chars), output)
    tell(summary, output)
    return exit_code(summary)


@diff.command()
@click.argument("directory", type=_DIRECTORY)
@click.option("--candidate", required=True, metavar="RUN", help="Run under test.")
@click.option(
    "--baseline", default="record", show_default=True, metavar="RUN", help="Run to compare with."
)
@click.option(
    "--worst",
    type=click.IntRange(min=1),
    metavar="N",
    help="The N tokens of the largest |delta|.  [default: 10]",
)
@click.option("--sequence", metavar="ID", help="Show one token of this sequence; needs --step.")
@click.option("--step", type=click.IntRange(min=0), metavar="T", help="Its 0-based output step.")
@_redact
def show(
    directory: Path,
    candidate: str,
    baseline: str,
    worst: int | None,
    sequence: str | None,
    step: int | None,
    redact: str | None,
) -> None:
    """Show tokens in their text, with both runs' best tokens."""
    from trace_audit.diff.compare import compare
    from trace_audit.diff.report_plan import check_candidates
    from trace_audit.diff.structure import worst_rows
    from trace_audit.report.token_view import render_tokens

    if (sequence is None) != (step is None):
        raise UsageError("--sequence and --step go together: they name one token.")
    if sequence is not None and worst is not None:
        raise UsageError("--worst cannot be combined with --sequence and --step.")
    check_candidates(baseline, [candidate])
    comparison = compare(_open(directory, redact), baseline, candidate)
    if sequence is None or step is None:
        rows = worst_rows(comparison.pair, worst or 10)
    else:
        rows = [_row(comparison, sequence, step)]
    tokens = comparison.details.tokens(rows)
    width, color = _target(None)
    emit(render_tokens(comparison.summary, tokens, width=width, color=color), None)


def _open(directory: Path, redact: str | None) -> AuditSource:
    from trace_audit.diff.source import AuditSource
    from trace_audit.storage.audit_dir import AuditDir

    return AuditSource(AuditDir.open(directory), redact_text=redact == "text")


def _save(directory: Path, report: ReportSummary, comparison: Comparison) -> None:
    from trace_audit.diff.save import save_comparison
    from trace_audit.report.as_json import render_pair_json

    save_comparison(directory / "diffs", comparison, render_pair_json(report, comparison.summary))


def _exhibit(plan: ReportPlan, comparison: Comparison, num_sequences: int | None) -> Exhibit:
    from trace_audit.diff.exhibit import exhibit

    return exhibit(
        plan.source,
        comparison,
        page_comparisons=len(plan.candidates),
        num_sequences=num_sequences,
    )


def _row(comparison: Comparison, sequence: str, step: int) -> int:
    import numpy as np

    pair = comparison.pair
    if sequence not in pair.trace.sequence_ids:
        raise UsageError(
            f"The trace has no sequence {sequence!r}.",
            hint=f"Its ids run from {pair.trace.sequence_ids[0]!r} to "
            f"{pair.trace.sequence_ids[-1]!r}.",
        )
    index = pair.trace.sequence_ids.index(sequence)
    rows = np.arange(pair.first_row[index], pair.first_row[index + 1])
    rows = rows[pair.step[rows] == step]
    if not len(rows):
        length = int(pair.trace.start[index + 1] - pair.trace.start[index])
        raise UsageError(
            f"Sequence {sequence!r} has no scored and compared token at step {step}.",
            hint=f"Its {length} output tokens are steps 0 to {length - 1}.",
        )
    return int(rows[0])


def _rendered(
    summary: ReportSummary, output_format: str, output: Path | None, max_chars: int | None
) -> str:
    if output_format == "json":
        from trace_audit.report.as_json import render_json

        return render_json(summary)
    if output_format == "markdown":
        from trace_audit.report.markdown import render_markdown

        text = render_markdown(summary, max_chars=max_chars)
        if max_chars is not None and len(text) > max_chars:
            say(f"the report is {len(text):,} characters long: what is left is never cut")
        return text
    if output_format == "junit":
        from trace_audit.report.junit import render_junit

        return render_junit(summary)
    from trace_audit.report.terminal import render_terminal

    width, color = _target(output)
    return render_terminal(summary, width=width, color=color)


def _target(output: Path | None) -> tuple[int, bool]:
    """Columns of the target, and whether it shows styles: only a terminal does."""
    import os

    color = output is None and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return max(60, shutil.get_terminal_size((80, 24)).columns), color
