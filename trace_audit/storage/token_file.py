"""The rows of a run on the disk: held to their order, then read in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from trace_audit.errors import AuditDirError
from trace_audit.storage.row_order import check_row_order
from trace_audit.storage.schema import OPTIONAL_FIELDS, TOKENS_SCHEMA
from trace_audit.storage.tables import StoredTable

_ORDER = ("sequence_index", "step")
# As many as are decoded at once: nothing is copied together.
_PIECE_ROWS = 16_384


class TokenFile:
    """tokens.parquet of one run; made by :meth:`AuditDir.open_tokens`, which checks its bytes."""

    def __init__(self, path: Path) -> None:
        """Looks at the file, and reads its keys once.

        Raises:
            AuditDirError: It cannot be read, has other columns, or its rows are out of order.
        """
        self._stored = StoredTable(path, TOKENS_SCHEMA, optional=OPTIONAL_FIELDS)
        self._check_order()

    @property
    def num_rows(self) -> int:
        """Rows of the run."""
        return self._stored.num_rows

    @property
    def column_names(self) -> tuple[str, ...]:
        """Columns of the run."""
        return self._stored.column_names

    @property
    def metadata(self) -> dict[str, str]:
        """Format version and digest of the trace."""
        return self._stored.metadata

    def slices(self, ranges: Sequence[range], columns: Sequence[str]) -> Iterator[pa.Table]:
        """Rows of ascending ranges, a table each; see :meth:`StoredTable.slices`."""
        return self._stored.slices(ranges, columns)

    def pieces(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """All rows, some of them at a time."""
        return self.slices(pieces(self.num_rows), columns)

    def _check_order(self) -> None:
        last: pa.Table | None = None
        row = 0
        for piece in self.pieces(_ORDER):
            joined = piece if last is None else pa.concat_tables([last, piece])
            try:
                check_row_order(joined, first_row=row - (0 if last is None else 1))
            except ValueError as error:
                raise AuditDirError(
                    f"The rows of {self._stored.path} are not in order: {error}."
                ) from error
            row += len(piece)
            last = piece.slice(len(piece) - 1)


def pieces(num_rows: int, size: int = _PIECE_ROWS) -> list[range]:
    """Cuts rows 0 to num_rows - 1 into ranges of at most ``size``."""
    return [range(i, min(i + size, num_rows)) for i in np.arange(0, num_rows, size).tolist()]
