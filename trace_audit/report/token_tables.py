"""Tables of tokens in their text, for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text

from trace_audit.diff.summary import TokenDiff, TopToken
from trace_audit.report.format import (
    NOT_AVAILABLE,
    number,
    plain,
    shorten_left,
    shorten_right,
    signed,
)
from trace_audit.report.view import best_change, ranks

_TOKEN_WIDTH = 24
_SEQUENCE_WIDTH = 16
_MIN_CONTEXT = 16
_WORST_COLUMNS: dict[str, JustifyMethod] = {
    "delta": "right",
    "sequence": "left",
    "pos": "right",
    "baseline": "right",
    "rank": "left",
    "change": "left",
}


def worst_table(tokens: Sequence[TokenDiff], *, width: int) -> Table:
    """Rows by |delta|, each token between guillemets in its context.

    Where it is known, how many layers' routers chose other experts has a column.

    Args:
        tokens: What to show, in order.
        width: Columns for the whole table; the text takes what the numbers leave.
    """
    titles = dict(_WORST_COLUMNS)
    if any(token.routers_changed is not None for token in tokens):
        titles["routers"] = "right"
    rows = [_worst_cells(token)[: len(titles)] for token in tokens]
    table = _table()
    for name, justify in titles.items():
        table.add_column(name, justify=justify, no_wrap=True)
    table.add_column("text", no_wrap=True, overflow="crop")
    columns = zip(titles, *rows, strict=True)
    taken = sum(2 + max(cell_len(str(cell)) for cell in column) for column in columns)
    for token, cells in zip(tokens, rows, strict=True):
        table.add_row(*cells, in_context(token, max(_MIN_CONTEXT, width - taken)))
    return table


def _worst_cells(token: TokenDiff) -> list[Text]:
    change = "" if token.change in ("none", "unknown") else token.change
    return [
        Text(signed(token.delta), style="bold"),
        _sequence_cell(token),
        Text(str(token.place.position)),
        Text(number(token.baseline_logprob)),
        Text(ranks(token)),
        Text(change, style="red" if change == "hard flip" else ""),
        Text(str(token.routers_changed) if token.routers_changed else ""),
    ]


def _sequence_cell(token: TokenDiff) -> Text:
    return Text(shorten_right(plain(token.place.sequence_id), _SEQUENCE_WIDTH))


def flip_table(tokens: Sequence[TokenDiff]) -> Table:
    """Flips with the margin between the baseline's best two tokens on both sides."""
    table = _table()
    table.add_column("flip", no_wrap=True)
    table.add_column("sequence", no_wrap=True)
    table.add_column("pos", justify="right", no_wrap=True)
    table.add_column("margin", justify="right", no_wrap=True)
    table.add_column("candidate's", justify="right", no_wrap=True)
    table.add_column("best token", overflow="ellipsis", no_wrap=True)
    for token in tokens:
        margins = [
            NOT_AVAILABLE if margin is None else number(margin)
            for margin in (token.margin, token.candidate_margin)
        ]
        table.add_row(
            Text("hard" if token.change == "hard flip" else "", style="red"),
            _sequence_cell(token),
            Text(str(token.place.position)),
            *(Text(margin) for margin in margins),
            Text(best_change(token)),
        )
    return table


def in_context(token: TokenDiff, width: int) -> Text:
    """The token between guillemets, with as much text around it as fits."""
    middle = shorten_right(token.text, min(_TOKEN_WIDTH, max(1, width - 2)))
    room = max(2, width - cell_len(middle) - 2)
    before = shorten_left(token.before, room - min(cell_len(token.after), room // 3))
    after = shorten_right(token.after, room - cell_len(before))
    return Text.assemble((before, "dim"), "«", (middle, "bold"), "»", (after, "dim"))


def both_sides(token: TokenDiff) -> Table:
    """Both runs' own best tokens beside each other."""
    table = _table()
    for side in ("baseline", "candidate"):
        table.add_column(f"{side}'s best", no_wrap=True, overflow="ellipsis", max_width=28)
        table.add_column("logprob", justify="right", no_wrap=True)
    tops = (token.baseline_top, token.candidate_top)
    for i in range(max(len(top) for top in tops)):
        table.add_row(*(cell for top in tops for cell in _top_cells(token, top, i)))
    return table


def _top_cells(token: TokenDiff, top: tuple[TopToken, ...], index: int) -> Iterable[Text]:
    if index >= len(top):
        return Text(""), Text("")
    entry = top[index]
    forced = entry.token_id == token.token_id
    text = f"«{entry.text}»" if forced else f" {entry.text} "
    return Text(text, style="bold" if forced else ""), Text(number(entry.logprob))


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
