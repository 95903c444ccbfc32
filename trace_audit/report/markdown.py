"""The report as Markdown, for a comment on a pull request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trace_audit.diff.summary import Metric, PairSummary, ReportSummary, TokenDiff
from trace_audit.diff.verdict import Gating
from trace_audit.report import gate_view, structure_view, view
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
from trace_audit.report.identity_view import identity_rows
from trace_audit.report.router_view import router_lines
from trace_audit.text import escape_markdown

_WORST_SHOWN = 10
_CONTEXT = 40
_WORST, _WHERE, _METRICS, _ABOUT = "worst tokens", "where it is", "metrics", "configurations"
PARTS = (_WORST, _WHERE, _METRICS, _ABOUT)


def render_markdown(summary: ReportSummary, *, max_chars: int | None = None) -> str:
    """The report as GitHub-flavoured Markdown, with a final newline.

    Args:
        summary: What to say.
        max_chars: Leave out parts, in the order of ``PARTS``, until it is no longer than this.
            Verdicts, refusals and headlines stay whatever their length.
    """
    for dropped in range(len(PARTS) + 1):
        text = "\n".join(_report(summary, PARTS[:dropped])) + "\n"
        if max_chars is None or len(text) <= max_chars:
            break
    return text


def _report(summary: ReportSummary, without: Sequence[str]) -> Iterable[str]:
    yield "## trace-audit diff report"
    yield ""
    if _ABOUT not in without:
        yield from (escape_markdown(view.trace_line(summary.trace)), "")
        yield from (_fixed(view.CONVENTION), "")
    if summary.redacted:
        yield from (view.REDACTED, "")
    for line in view.invalid_lines(summary):
        yield from (f"**{escape_markdown(line)}**", "")
    if len(summary.pairs) > 1:
        yield from _grid(summary)
    for pair in summary.pairs:
        yield from _verdict(pair, summary.gating)
        yield from _pair(pair, without)
    if without:
        yield from (f"*Left out to be short: {', '.join(without)}.*", "")


def _verdict(pair: PairSummary, gating: Gating | None) -> Iterable[str]:
    line = gate_view.verdict_line(pair, gating)
    if line is None:
        return
    yield f"### {escape_markdown(line)}"
    yield ""
    rows = [[_fixed(cell) for cell in row] for row in gate_view.gate_rows(pair)]
    yield from _table(gate_view.GATE_HEADERS, rows)
    yield ""
    for text in [*gate_view.gate_lines(pair), *gate_view.source_lines(gating)]:
        yield f"- {escape_markdown(text)}"
    yield ""


def _grid(summary: ReportSummary) -> Iterable[str]:
    rows = []
    for pair in summary.pairs:
        name = escape_markdown(plain(pair.candidate.name))
        start = [f"{name} **FAULT**" if pair.fault else name]
        if summary.gating is not None:
            start.append(gate_view.verdict_word(pair))
        if pair.bitwise and not pair.fault:
            rows.append([*start, "BITWISE", *[""] * 4])
            continue
        names = ("abs.mean", "abs.max", "kl.mean", "rows.unequal")
        *before, unequal = [_fixed(metric_value(pair.metric(metric))) for metric in names]
        # A count, as on the terminal.
        flips = NOT_AVAILABLE if pair.flips.reason is not None else f"{pair.flips.flips:,}"
        rows.append([*start, *before, flips, unequal])
    verdict = [] if summary.gating is None else ["verdict"]
    headers = ["candidate", *verdict, "mean |delta|", "max", "KL", "flips", "unequal rows"]
    yield from _table([_fixed(header) for header in headers], rows)
    yield ""


def _pair(pair: PairSummary, without: Sequence[str]) -> Iterable[str]:
    yield f"### {escape_markdown(view.headline(pair))}"
    yield ""
    for line in view.warning_lines(pair):
        yield f"- **warning:** {escape_markdown(line)}."
    yield ""
    if _ABOUT not in without:
        yield from _about(pair)
    if pair.bitwise:
        return
    if _METRICS not in without:
        yield from _metrics(pair)
    if _WHERE not in without:
        yield from _places(pair)
    if _WORST not in without:
        yield from _worst(pair.worst[:_WORST_SHOWN])


def _about(pair: PairSummary) -> Iterable[str]:
    headers = ["", f"baseline {plain(pair.baseline.name)}", plain(pair.candidate.name)]
    identity = [[row.label, row.baseline, row.candidate] for row in identity_rows(pair)]
    escaped = [[escape_markdown(cell) for cell in row] for row in [headers, *identity]]
    yield from _table(escaped[0], escaped[1:])
    yield ""
    for line in view.scope_lines(pair):
        yield from (escape_markdown(line), "")


def _metrics(pair: PairSummary) -> Iterable[str]:
    for title, metrics in view.sections(pair):
        rows = [_metric_cells(pair, metric) for metric in metrics]
        yield from _table([title, *view.metric_headers(pair)[1:]], rows)
        yield ""
    for remark in [*view.band_lines(pair), *view.remarks(pair)]:
        yield f"- {escape_markdown(remark)}"
    yield ""


def _metric_cells(pair: PairSummary, metric: Metric) -> list[str]:
    label, value, between, *rest = view.metric_cells(pair, metric)
    normal = view.normal(metric)
    interval = between if normal is None else f"{between} ({normal})".strip()
    return [_fixed(cell) for cell in (label, value, interval, *rest)]


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
    for label, text in [*structure_view.structure_lines(pair), *router_lines(pair)]:
        yield f"- {label}: {_fixed(text)}"
    yield ""
    rows = structure_view.slice_rows(pair)
    if rows:
        cells = [[_fixed(cell) for cell in row[:-1]] for row in rows]
        yield from _table([_fixed(title) for title in structure_view.SLICE_HEADERS], cells)
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
