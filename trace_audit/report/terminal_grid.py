"""Several candidates in one grid, for the terminal."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from trace_audit.diff.summary import PairSummary, ReportSummary
from trace_audit.diff.verdict import Outcome
from trace_audit.report import gate_view
from trace_audit.report.format import NOT_AVAILABLE, metric_value, number, plain

_WIDE_GRID = 110
_NARROW_GRID = 76
_NAME_WIDTH = 13
VERDICT_STYLES: dict[Outcome, str] = {
    "pass": "bold green",
    "fail": "bold red",
    "inconclusive": "bold yellow",
    "invalid": "bold magenta",
}


def candidate_grid(summary: ReportSummary, width: int) -> Table:
    """A row a candidate.

    Args:
        summary: With at least two candidates.
        width: Columns; few of them cost columns of numbers, where there are verdicts.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("candidate", overflow="fold", min_width=_NAME_WIDTH)
    if summary.gating is not None:
        table.add_column("verdict", no_wrap=True)
    columns = _grid_columns(summary, width)
    for title in columns:
        # Titles of two lines leave narrow terminals room for names.
        shown = title if width >= _WIDE_GRID else title.replace(" ", "\n")
        table.add_column(shown, justify="right", no_wrap=True, vertical="bottom")
    for pair in summary.pairs:
        table.add_row(*_grid_row(pair, columns))
    return table


def _grid_columns(summary: ReportSummary, width: int) -> list[str]:
    """Titles; a verdict, or a narrow terminal, takes the room of what says least."""
    titles = ["mean |delta|", "max", "KL", "flips", "hard", "unequal rows", "seconds"]
    if width >= (_NARROW_GRID if summary.gating is None else _WIDE_GRID):
        return titles
    return [title for title in titles if title not in ("max", "unequal rows", "hard")]


def _grid_row(pair: PairSummary, columns: list[str]) -> list[Text]:
    name = Text(plain(pair.candidate.name))
    if pair.fault:
        name.append(" FAULT", style="bold red")
    row = [name]
    if pair.verdict is not None:
        row.append(Text(gate_view.verdict_word(pair), style=VERDICT_STYLES[pair.verdict.outcome]))
    seconds = pair.candidate.engine_seconds
    cost = Text("-" if seconds is None else number(seconds))
    if pair.bitwise and not pair.fault:
        return [*row, Text("BITWISE", style="green"), *[Text("")] * (len(columns) - 2), cost]
    flips = pair.flips
    cells = {
        "mean |delta|": metric_value(pair.metric("abs.mean")),
        "max": metric_value(pair.metric("abs.max")),
        "KL": metric_value(pair.metric("kl.mean")),
        "flips": str(flips.flips) if flips.reason is None else NOT_AVAILABLE,
        "hard": NOT_AVAILABLE if flips.hard is None else str(flips.hard),
        "unequal rows": metric_value(pair.metric("rows.unequal")),
    }
    return [*row, *(Text(cells[title]) for title in columns[:-1]), cost]
