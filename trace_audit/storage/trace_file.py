"""trace.parquet, read a few sequences at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trace_audit.errors import AuditDirError
from trace_audit.storage.schema import NUM_SUPPORT, TRACE_SCHEMA
from trace_audit.storage.tables import StoredTable
from trace_audit.storage.token_file import pieces
from trace_audit.storage.trace import (
    TOKEN_COLUMNS,
    TraceDigest,
    TraceSequence,
    TraceTokens,
    int32_array,
    trace_sequences,
    trace_tokens,
)

# Sequences decoded at once: a support of 24 ids a token makes them the widest rows of an audit.
_SEQUENCES = 32
_Row = TypeVar("_Row", bound=TraceTokens)


class TraceFile:
    """The trace of an audit; made by :meth:`AuditDir.open_trace`, which checks its bytes."""

    def __init__(self, path: Path, digest: str) -> None:
        """Looks at the file.

        Args:
            path: The file.
            digest: Of the trace that it must hold (``trace_digest``).

        Raises:
            AuditDirError: It cannot be read, or has other columns.
        """
        self._path = path
        self._digest = digest
        self._stored = StoredTable(path, TRACE_SCHEMA)

    def sequences(self) -> Iterator[TraceSequence]:
        """Every sequence in the order of the prompts file, a few in memory at a time.

        Raises:
            AuditDirError: The lists of a row do not belong together, or, after the last one, the
                trace is not the one that was recorded.
        """
        digest = TraceDigest()
        for sequence in self._rows(TRACE_SCHEMA.names, trace_sequences):
            digest.update(sequence)
            yield sequence
        if digest.hexdigest() != self._digest:
            raise AuditDirError(
                f"{self._path} is not the trace that audit.json names.",
                hint="Files of two audits were mixed; copy the whole directory again.",
            )

    def tokens(self) -> Iterator[TraceTokens]:
        """The tokens of every sequence, without the support, which is most of the file.

        The digest of the content is over the support too, so it is not held to audit.json here;
        the file's own sha256 in audit.json was.

        Raises:
            AuditDirError: The file cannot be read, or a mask is not as long as its output.
        """
        return self._rows(TOKEN_COLUMNS, trace_tokens)

    def _rows(
        self, columns: Sequence[str], made: Callable[[pa.Table], list[_Row]]
    ) -> Iterator[_Row]:
        ranges = pieces(self._stored.num_rows, _SEQUENCES)
        for table in self._stored.slices(ranges, columns, batch_rows=_SEQUENCES):
            try:
                rows = made(table)
            except ValueError as error:
                raise AuditDirError(f"{self._path} is damaged: {error}.") from error
            yield from rows

    def support(self, ranges: Sequence[range]) -> Iterator[NDArray[np.int32]]:
        """Support ids of ascending ranges of sequences: int32 [T, 24] each, -1 where none."""
        column = "support_token_ids"
        for table in self._stored.slices(ranges, [column], batch_rows=_SEQUENCES):
            rows = table[column].combine_chunks().flatten()
            yield int32_array(rows.flatten()).reshape(len(rows), NUM_SUPPORT)

    def prompt(self, index: int) -> NDArray[np.int32]:
        """Prompt ids of one sequence: int32 [P]."""
        column = "prompt_token_ids"
        (table,) = self._stored.slices([range(index, index + 1)], [column], batch_rows=1024)
        return int32_array(table[column].combine_chunks().flatten())
