"""trace.parquet, read a few sequences at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
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
        ranges = pieces(self._stored.num_rows, _SEQUENCES)
        for table in self._stored.slices(ranges, TRACE_SCHEMA.names, batch_rows=_SEQUENCES):
            try:
                sequences = trace_sequences(table)
            except ValueError as error:
                raise AuditDirError(f"{self._path} is damaged: {error}.") from error
            for sequence in sequences:
                digest.update(sequence)
                yield sequence
        if digest.hexdigest() != self._digest:
            raise AuditDirError(
                f"{self._path} is not the trace that audit.json names.",
                hint="Files of two audits were mixed; copy the whole directory again.",
            )

    def tokens(self) -> Iterator[TraceTokens]:
        """The tokens of every sequence; the support, most of the file, is not read.

        The file's own sha256 is held to audit.json, and so is the digest of its content where that
        is read anyway: :meth:`sequences`.

        Raises:
            AuditDirError: The file cannot be read.
        """
        ranges = pieces(self._stored.num_rows, _SEQUENCES)
        for table in self._stored.slices(ranges, TOKEN_COLUMNS, batch_rows=_SEQUENCES):
            yield from trace_tokens(table)

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
