"""The report on a terminal: compact, and right at 80 columns as at 160.

Token text and names reach rich only as :class:`rich.text.Text`, never as markup.
"""

from __future__ import annotations

from collections.abc import Iterable
from io import StringIO

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trace_audit.diff.summary import Metric, PairSummary, ReportSummary
from trace_audit.diff.verdict import Gating
from trace_audit.report import gate_view, structure_view, view
from trace_audit.report.format import (
    number,
    plain,
    setting,
    sparkline,
)
from trace_audit.report.identity_view import identity_rows
from trace_audit.report.router_view import router_lines
from trace_audit.report.terminal_grid import VERDICT_STYLES, candidate_grid
from trace_audit.report.token_tables import flip_table, worst_table

_WIDE = 150
_WIDE_WITH_FLOOR = 160
_TOKENS_SHOWN = 10
_TOKENS_SHOWN_OF_MANY = 3
_FLIPS_SHOWN = 5


def render_terminal(summary: ReportSummary, *, width: int, color: bool) -> str:
    """The report as text.

    Args:
        summary: What to say.
        width: Columns.
        color: Whether the target understands ANSI styles.
    """
    blocks = list(_report(summary, width))
    return render_blocks(blocks, width=width, color=color)


def render_blocks(blocks: Iterable[RenderableType], *, width: int, color: bool) -> str:
    """Renderables as text; without color there is no escape sequence in it."""
    buffer = StringIO()
    console = Console(
        file=buffer,
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
    )
    for block in blocks:
        # A line that asks not to be wrapped may be wider than the page: it is there to be copied.
        whole = isinstance(block, Text) and bool(block.no_wrap)
        console.print(block, soft_wrap=whole)
    lines = buffer.getvalue().splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"


def heading(text: str) -> Text:
    """A section's title."""
    return Text(text, style="bold")


def _report(summary: ReportSummary, width: int) -> Iterable[RenderableType]:
    yield Text.assemble(("Audit ", "bold"), plain(summary.trace.path))
    yield Text(view.trace_line(summary.trace), style="dim")
    yield Text(view.CONVENTION, style="dim")
    if summary.redacted:
        yield Text(view.REDACTED, style="dim")
    yield ""
    for line in view.invalid_lines(summary):
        yield Text(line, style="bold red")
    if len(summary.pairs) > 1:
        yield candidate_grid(summary, width)
        for line in gate_view.source_lines(summary.gating):
            yield _indented(Text(line, style="dim"))
        for pair in summary.pairs:
            yield ""
            yield from _verdict(pair, summary.gating)
            yield from _short_pair(pair, width)
    else:
        yield from _verdict(summary.pairs[0], summary.gating)
        for line in gate_view.source_lines(summary.gating):
            yield _indented(Text(line, style="dim"))
        if summary.gating is not None:
            yield ""
        yield from _pair(summary.pairs[0], width)
    yield ""
    yield heading("Next")
    for command, purpose in summary.next_commands:
        yield Text(f"  # {purpose}", style="dim")
        # Never wrapped: a command is there to be copied.
        yield Text(f"  {plain(command)}", no_wrap=True, overflow="ignore")


def _verdict(pair: PairSummary, gating: Gating | None) -> Iterable[RenderableType]:
    line = gate_view.verdict_line(pair, gating)
    if line is None or pair.verdict is None:
        return
    yield Text(line, style=VERDICT_STYLES[pair.verdict.outcome])
    table = _table()
    for title in gate_view.GATE_HEADERS:
        table.add_column(title, overflow="fold")
    for row in gate_view.gate_rows(pair):
        table.add_row(*(Text(cell) for cell in row))
    yield _indented(table)
    for text in gate_view.gate_lines(pair):
        yield _indented(Text(text, style="dim"))


def _pair(pair: PairSummary, width: int) -> Iterable[RenderableType]:
    yield _headline(pair)
    yield from _warnings(pair)
    yield ""
    yield _identity(pair)
    yield ""
    for line in view.scope_lines(pair):
        yield Text(line)
    if pair.bitwise:
        return
    yield ""
    yield _metrics(pair, width)
    for remark in [*view.band_lines(pair), *view.remarks(pair)]:
        yield Text(remark, style="dim")
    yield ""
    yield from _positions(pair)
    yield from _structure(pair)
    yield ""
    yield heading("Best-token changes")
    yield _indented(Text(view.flip_line(pair)))
    if pair.flips.examples:
        yield _indented(flip_table(pair.flips.examples[:_FLIPS_SHOWN]))
    if pair.worst:
        yield ""
        yield heading("Worst tokens")
        yield _indented(worst_table(pair.worst[:_TOKENS_SHOWN], width=width - 2))


def _short_pair(pair: PairSummary, width: int) -> Iterable[RenderableType]:
    yield _headline(pair)
    yield from _warnings(pair)
    referee = gate_view.referee_line(pair)
    if referee is not None:
        yield _indented(Text(referee))
    for difference in pair.config_differences:
        values = f"{setting(difference.baseline)} → {setting(difference.candidate)}"
        yield _indented(Text(f"{difference.key}: {values}"))
    if pair.bitwise:
        return
    yield from (_indented(block) for block in _positions(pair))
    if pair.structure is not None:
        text = structure_view.onset_text(pair.structure.onset)
        yield _indented(Text.assemble(("onset: ", "bold"), text))
    for label, text in router_lines(pair)[:1]:
        yield _indented(Text.assemble((f"{label}: ", "bold"), text))
    if pair.worst:
        yield _indented(worst_table(pair.worst[:_TOKENS_SHOWN_OF_MANY], width=width - 2))


def _headline(pair: PairSummary) -> Text:
    color = "red" if pair.fault else ("green" if pair.bitwise else "")
    return Text(view.headline(pair), style=f"bold {color}".strip())


def _warnings(pair: PairSummary) -> Iterable[RenderableType]:
    for line in view.warning_lines(pair):
        yield Text.assemble(("warning: ", "bold yellow"), f"{line}.")


def _identity(pair: PairSummary) -> Table:
    table = _table()
    table.add_column("", style="dim", no_wrap=True)
    table.add_column(Text(f"baseline {plain(pair.baseline.name)}"), overflow="fold")
    table.add_column(Text(f"candidate {plain(pair.candidate.name)}"), overflow="fold")
    for row in identity_rows(pair):
        style = "yellow" if row.differs else ""
        label = f"{row.label} *" if row.differs else row.label
        table.add_row(Text(label), Text(row.baseline), Text(row.candidate, style=style))
    return table


def _metrics(pair: PairSummary, width: int) -> RenderableType:
    blocks = view.sections(pair)
    headers = view.metric_headers(pair)
    wide = _WIDE if "floor" not in headers else _WIDE_WITH_FLOOR
    if width < wide or len(blocks) < 2:
        return _metric_table(pair, blocks)
    # Two columns of about the same height, sections kept whole and in order.
    total = sum(len(rows) + 1 for _, rows in blocks)
    left: list[tuple[str, list[Metric]]] = []
    while sum(len(rows) + 1 for _, rows in left) * 2 < total:
        left.append(blocks[len(left)])
    both = Table.grid(padding=(0, 6))
    both.add_row(_metric_table(pair, left), _metric_table(pair, blocks[len(left) :]))
    return both


def _metric_table(pair: PairSummary, blocks: list[tuple[str, list[Metric]]]) -> Table:
    table = _table()
    for title in view.metric_headers(pair):
        right = title in ("value", "floor")
        table.add_column(title, justify="right" if right else "left", no_wrap=True)
    for title, rows in blocks:
        table.add_row(Text(title, style="bold"))
        for metric in rows:
            label, value, *rest = view.metric_cells(pair, metric)
            cells = (Text(cell, style="dim") for cell in rest)
            table.add_row(Text(f"  {label}"), Text(value), *cells)
            normal = view.normal(metric)
            if normal is not None:
                table.add_row("", "", Text(normal, style="dim"))
    return table


def _positions(pair: PairSummary) -> Iterable[RenderableType]:
    for label, where in view.where_lines(pair):
        yield Text.assemble((f"{label}: ", "bold"), where)
    largest = view.largest_bucket(pair)
    if largest is None:
        return
    first, last = pair.buckets[0].start, pair.buckets[-1].end - 1
    yield Text.assemble(
        ("mean |delta| by position: ", "bold"),
        f"{first} ",
        (sparkline(pair.buckets), "cyan"),
        f" {last}",
    )
    yield Text(
        f"  log-spaced; largest {number(largest.mean_abs_delta)} nats at "
        f"{view.bucket_range(largest)}; a dot is exactly 0",
        style="dim",
    )


def _structure(pair: PairSummary) -> Iterable[RenderableType]:
    lines = [*structure_view.structure_lines(pair), *router_lines(pair)]
    for label, text in lines:
        yield Text.assemble((f"{label}: ", "bold"), text)
    rows = structure_view.slice_rows(pair)
    if not rows:
        return
    table = _table()
    for title in (*structure_view.SLICE_HEADERS, ""):
        right = title in ("tokens", "mean |delta|")
        table.add_column(title, justify="right" if right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row[:-1]), Text(row[-1], style="cyan"))
    yield _indented(table)


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")


def _indented(block: RenderableType) -> Padding:
    return Padding(block, (0, 0, 0, 2))
