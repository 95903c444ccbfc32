"""The report as Markdown, for a comment on a pull request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trace_audit.diff.summary import PairSummary, ReportSummary, TokenDiff
from trace_audit.report import view
from trace_audit.report.format import (
    NOT_AVAILABLE,
    metric_value,
    number,
    plain,
    shorten_left,
    shorten_right,
    signed,
    sparkline,
)
from trace_audit.text import escape_markdown

_WORST_SHOWN = 10
_CONTEXT = 40


def render_markdown(summary: ReportSummary) -> str:
    """The report as GitHub-flavoured Markdown, with a final newline."""
    return "\n".join(_report(summary)) + "\n"


def _report(summary: ReportSummary) -> Iterable[str]:
    yield "## trace-audit diff report"
    yield ""
    yield escape_markdown(view.trace_line(summary.trace))
    yield ""
    yield _fixed(view.CONVENTION)
    yield ""
    if summary.redacted:
        yield from (view.REDACTED, "")
    for line in view.invalid_lines(summary):
        yield from (f"**{escape_markdown(line)}**", "")
    if len(summary.pairs) > 1:
        yield from _grid(summary)
    for pair in summary.pairs:
        yield from _pair(pair)


def _grid(summary: ReportSummary) -> Iterable[str]:
    rows = []
    for pair in summary.pairs:
        name = plain(pair.candidate.name)
        if pair.bitwise:
            rows.append([escape_markdown(name), "BITWISE", *[""] * 4])
            continue
        names = ("abs.mean", "abs.max", "kl.mean", "flip.all", "rows.unequal")
        values = [_fixed(metric_value(pair.metric(metric))) for metric in names]
        rows.append([escape_markdown(name), *values])
    headers = ["candidate", "mean |delta|", "max", "KL", "flips", "unequal rows"]
    yield from _table([_fixed(header) for header in headers], rows)
    yield ""


def _pair(pair: PairSummary) -> Iterable[str]:
    yield f"### {escape_markdown(view.headline(pair))}"
    yield ""
    for line in view.warning_lines(pair):
        yield f"- **warning:** {escape_markdown(line)}."
    yield ""
    headers = ["", f"baseline {plain(pair.baseline.name)}", plain(pair.candidate.name)]
    identity = [[row.label, row.baseline, row.candidate] for row in view.identity_rows(pair)]
    escaped = [[escape_markdown(cell) for cell in row] for row in [headers, *identity]]
    yield from _table(escaped[0], escaped[1:])
    yield ""
    for line in view.scope_lines(pair):
        yield from (escape_markdown(line), "")
    if pair.bitwise:
        return
    for title, metrics in view.sections(pair):
        rows = [[_fixed(cell) for cell in view.metric_cells(metric)] for metric in metrics]
        yield from _table([title, "value", "95 % interval"], rows)
        yield ""
    for remark in view.remarks(pair):
        yield f"- {escape_markdown(remark)}"
    yield ""
    yield from _places(pair)
    yield from _worst(pair.worst[:_WORST_SHOWN])


def _places(pair: PairSummary) -> Iterable[str]:
    for label, where in view.where_lines(pair):
        yield f"- {label}: {escape_markdown(where)}"
    yield f"- best token: {_fixed(view.flip_line(pair))}"
    largest = view.largest_bucket(pair)
    if largest is not None:
        first, last = pair.buckets[0].start, pair.buckets[-1].end - 1
        yield (
            f"- mean |delta| by position, {first} `{sparkline(pair.buckets)}` {last}, largest "
            f"{number(largest.mean_abs_delta)} nats at {view.bucket_range(largest)}"
        )
    yield ""


def _worst(tokens: Sequence[TokenDiff]) -> Iterable[str]:
    if not tokens:
        return
    yield "<details><summary>Worst tokens</summary>"
    yield ""
    headers = ["delta", "sequence", "position", "baseline", "rank", "change", "margin", "text"]
    yield from _table(headers, [_token_cells(token) for token in tokens])
    yield ""
    yield "</details>"
    yield ""


def _token_cells(token: TokenDiff) -> list[str]:
    before = shorten_left(token.before, _CONTEXT)
    after = shorten_right(token.after, _CONTEXT // 2)
    return [
        signed(token.delta),
        escape_markdown(plain(token.place.sequence_id)),
        str(token.place.position),
        number(token.baseline_logprob),
        _fixed(view.ranks(token)),
        "" if token.change in ("none", "unknown") else token.change,
        NOT_AVAILABLE if token.margin is None else number(token.margin),
        escape_markdown(f"{before}«{token.text}»{after}"),
    ]


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    yield _line(headers)
    yield "|" + "---|" * len(headers)
    for row in rows:
        yield _line(row)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _fixed(text: str) -> str:
    """Escapes this program's own words, which are few, so that the source stays readable."""
    for character in "|_[>":
        text = text.replace(character, f"\\{character}")
    return text
