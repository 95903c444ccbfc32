"""Plain columns for standard output: readable on a terminal, and split by whitespace in a pipe."""

from __future__ import annotations

from collections.abc import Sequence

from trace_audit.cli.messages import printable


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Left-aligned columns two spaces apart, one line a row, the header first.

    An empty cell is shown as `-`, so that every line has the same number of fields.
    """
    cells = [[printable(str(cell)) or "-" for cell in row] for row in [header, *rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    lines = ("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in cells)
    return "".join(line.rstrip() + "\n" for line in lines)
