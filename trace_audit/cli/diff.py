"""`trace-audit diff`: compare runs token by token."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trace_audit.errors import InvalidComparisonError, UsageError

if TYPE_CHECKING:
    from trace_audit.diff.compare import Comparison
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
    "--baseline", default="record", show_default=True, metavar="RUN", help="Run to compare with."
)
@click.option(
    "--candidate",
    "candidates",
    multiple=True,
    metavar="RUN",
    help="Run under test; repeatable. Default: every other complete run.",
)
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["terminal", "json", "markdown", "html"]),
    default="terminal",
    show_default=True,
    help="How the report is written.",
)
@click.option("--output", type=_DIRECTORY, metavar="FILE", help="Write the report to this file.")
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
    baseline: str,
    candidates: tuple[str, ...],
    output_format: str,
    output: Path | None,
    redact: str | None,
    html_sequences: int | None,
    no_save: bool,
) -> None:
    """Report how runs differ, and save the per-token diffs in DIRECTORY/diffs.

    Delta is candidate minus baseline log-probability of the same token, in nats; positive means
    that the candidate is more confident. Exits 4 if a run cannot be compared.
    """
    from trace_audit.diff.compare import compare_all

    if html_sequences is not None and output_format != "html":
        raise UsageError("--html-sequences has no effect without --format html.")
    source = _open(directory, redact)
    names = candidates or tuple(n for n in source.audit.run_names() if n != baseline)
    summary, comparisons = compare_all(source, baseline, tuple(dict.fromkeys(names)))
    if not no_save:
        _save(directory, summary, comparisons)
    if output_format == "html":
        _emit(_html(source, summary, comparisons, html_sequences), output)
    else:
        _emit(_rendered(summary, output_format, output), output)
    if summary.invalid:
        first = summary.invalid[0]
        raise InvalidComparisonError(
            f"{len(summary.invalid)} of {len(summary.invalid) + len(comparisons)} candidates "
            f"cannot be compared; {first.candidate}: {first.message}",
            hint=first.hint,
        )


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
    from trace_audit.diff.compare import check_candidates, compare
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
    tokens = [comparison.details.token(row) for row in rows]
    width, color = _target(None)
    _emit(render_tokens(comparison.summary, tokens, width=width, color=color), None)


def _open(directory: Path, redact: str | None) -> AuditSource:
    from trace_audit.diff.source import AuditSource
    from trace_audit.storage.audit_dir import AuditDir

    return AuditSource(AuditDir.open(directory), redact_text=redact == "text")


def _save(directory: Path, summary: ReportSummary, comparisons: list[Comparison]) -> None:
    from trace_audit.diff.save import save_comparison
    from trace_audit.report.as_json import render_pair_json

    for comparison in comparisons:
        text = render_pair_json(summary, comparison.summary)
        save_comparison(directory / "diffs", comparison, summary, text)


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
    rows = np.flatnonzero((pair.sequence == index) & (pair.step == step))
    if not len(rows):
        length = int(pair.trace.start[index + 1] - pair.trace.start[index])
        raise UsageError(
            f"Sequence {sequence!r} has no scored and compared token at step {step}.",
            hint=f"Its {length} output tokens are steps 0 to {length - 1}.",
        )
    return int(rows[0])


def _rendered(summary: ReportSummary, output_format: str, output: Path | None) -> str:
    if output_format == "json":
        from trace_audit.report.as_json import render_json

        return render_json(summary)
    if output_format == "markdown":
        from trace_audit.report.markdown import render_markdown

        return render_markdown(summary)
    from trace_audit.report.terminal import render_terminal

    width, color = _target(output)
    return render_terminal(summary, width=width, color=color)


def _html(
    source: AuditSource,
    summary: ReportSummary,
    comparisons: list[Comparison],
    num_sequences: int | None,
) -> str:
    from trace_audit.diff.exhibit import exhibits
    from trace_audit.report.html import render_html

    return render_html(summary, exhibits(source, comparisons, num_sequences=num_sequences))


def _target(output: Path | None) -> tuple[int, bool]:
    """Columns of the target, and whether it shows styles: only a terminal does."""
    import os

    color = output is None and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return max(60, shutil.get_terminal_size((80, 24)).columns), color


def _emit(text: str, output: Path | None) -> None:
    if output is None:
        # A stream in a narrow encoding shows escapes rather than failing on a token's text.
        encoding = sys.stdout.encoding or "utf-8"
        click.echo(text.encode(encoding, "backslashreplace").decode(encoding), nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"The report cannot be written to {output}: {error.strerror or error}."
        ) from error
