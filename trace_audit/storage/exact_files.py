"""Whole distributions at some positions of the trace, and the exact KL of runs there.

`full_logprobs.parquet` beside the record run holds the distributions, `exact_kl.parquet` beside
every replay what it scored against them. Distributions are large, so they are read and written a
small row group at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from trace_audit.errors import AuditDirError
from trace_audit.storage.audit_dir import RECORD_RUN
from trace_audit.storage.files import check_file
from trace_audit.storage.row_order import check_row_order
from trace_audit.storage.schema import EXACT_KL_SCHEMA, FULL_LOGPROBS_SCHEMA
from trace_audit.storage.tables import (
    read_metadata,
    read_table,
    reading,
    write_table,
)

if TYPE_CHECKING:
    from trace_audit.storage.audit_dir import AuditDir

FULL_LOGPROBS_NAME = "full_logprobs.parquet"
EXACT_KL_NAME = "exact_kl.parquet"
_ROWS_A_GROUP = 64  # of 152,000 ids: 39 MB


class FullLogprobsFile:
    """A file of whole distributions, read a row group at a time.

    Args:
        path: In `FULL_LOGPROBS_SCHEMA`.

    Attributes:
        sequence_index, step: int32 [n], where they are, sorted.

    Raises:
        AuditDirError: It cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with reading(path), pq.ParquetFile(path) as file:
            positions = file.read(columns=["sequence_index", "step"])
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        self._starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.sequence_index: NDArray[np.int32] = positions["sequence_index"].to_numpy()
        self.step: NDArray[np.int32] = positions["step"].to_numpy()

    def __len__(self) -> int:
        """Positions, n."""
        return len(self.step)

    def read(self, wanted: NDArray[np.bool_]) -> Iterator[tuple[NDArray[np.int64], pa.Table]]:
        """The wanted rows, those of one row group in memory at a time.

        Args:
            wanted: bool [n].

        Returns:
            int64 [m] row numbers with their rows, ascending.
        """
        with reading(self._path), pq.ParquetFile(self._path) as file:
            for group in range(file.num_row_groups):
                start, end = self._starts[group], self._starts[group + 1]
                rows = start + np.flatnonzero(wanted[start:end])
                if len(rows):
                    table = file.read_row_group(group).cast(FULL_LOGPROBS_SCHEMA)
                    yield rows, table.take(rows - start)


def logprob_rows(table: pa.Table) -> NDArray[np.float32]:
    """The column `logprobs` as float32 [n, V].

    Raises:
        ValueError: Its rows differ in length.
    """
    flat = table["logprobs"].combine_chunks().flatten().to_numpy()
    rows: NDArray[np.float32] = flat.reshape(table.num_rows, -1)
    return rows


def full_logprobs_table(
    sequence_index: NDArray[np.int32], step: NDArray[np.int32], logprobs: NDArray[np.float32]
) -> pa.Table:
    """Rows of `full_logprobs.parquet` from int32 [n], int32 [n] and float32 [n, V]."""
    count, width = logprobs.shape
    offsets = pa.array(np.arange(count + 1, dtype=np.int32) * width)
    kind = FULL_LOGPROBS_SCHEMA.field("logprobs").type
    rows = pa.ListArray.from_arrays(offsets, pa.array(logprobs.ravel()), type=kind)
    return pa.table([pa.array(sequence_index), pa.array(step), rows], schema=FULL_LOGPROBS_SCHEMA)


def write_full_logprobs(
    path: Path, tables: Iterable[pa.Table], metadata: Mapping[str, str]
) -> None:
    """Writes whole distributions; the row groups depend on the rows alone, not on the tables."""
    write_table(path, FULL_LOGPROBS_SCHEMA, _regrouped(tables), metadata)


def exact_kl_table(
    sequence_index: NDArray[np.int32],
    step: NDArray[np.int32],
    from_record: NDArray[np.float64],
    to_record: NDArray[np.float64],
) -> pa.Table:
    """Rows of `exact_kl.parquet`, all arrays [n]."""
    columns = [pa.array(column) for column in (sequence_index, step, from_record, to_record)]
    return pa.table(columns, schema=EXACT_KL_SCHEMA)


def write_exact_kl(path: Path, tables: Sequence[pa.Table], metadata: Mapping[str, str]) -> None:
    """Writes exact KL as one row group."""
    table = pa.concat_tables(tables).combine_chunks()
    write_table(path, EXACT_KL_SCHEMA, [table], metadata)


def read_exact_kl(audit: AuditDir, run: str) -> pa.Table | None:
    """A run's exact KL in `EXACT_KL_SCHEMA`; None if it has none.

    Raises:
        AuditDirError: The file is damaged.
        InvalidComparisonError: It is of another trace.
    """
    path = _checked(audit, run, EXACT_KL_NAME)
    if path is None:
        return None
    table, metadata = read_table(path, EXACT_KL_SCHEMA)
    audit.check_metadata(run, path, metadata)
    try:
        check_row_order(table)
    except ValueError as error:
        raise AuditDirError(f"The rows of {path} are not in order: {error}.") from error
    return table


def full_logprobs_entry(audit: AuditDir) -> object:
    """Size and sha256 of the record run's whole distributions; None if it has none."""
    if RECORD_RUN not in audit.run_names():
        return None
    files = audit.run_info(RECORD_RUN).get("files")
    return files.get(FULL_LOGPROBS_NAME) if isinstance(files, Mapping) else None


def open_full_logprobs(audit: AuditDir, run: str) -> FullLogprobsFile | None:
    """The whole distributions beside a run; None if it has none.

    Raises:
        AuditDirError: The file is damaged.
        InvalidComparisonError: It is of another trace.
    """
    path = _checked(audit, run, FULL_LOGPROBS_NAME)
    if path is None:
        return None
    with reading(path):
        schema = pq.read_schema(path)
    if not schema.equals(FULL_LOGPROBS_SCHEMA):
        raise AuditDirError(
            f"{path} does not have the columns of this format.",
            hint="It was written by something else; record again.",
        )
    audit.check_metadata(run, path, read_metadata(path))
    return FullLogprobsFile(path)


def _checked(audit: AuditDir, run: str, name: str) -> Path | None:
    files = audit.run_info(run).get("files")
    if not isinstance(files, Mapping) or name not in files:
        return None
    path = audit.run_directory(run) / name
    check_file(path, files[name])
    return path


def _regrouped(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The same rows in tables of `_ROWS_A_GROUP`, the last one possibly smaller."""
    waiting: list[pa.Table] = []
    num_waiting = 0
    for table in tables:
        while num_waiting + table.num_rows >= _ROWS_A_GROUP:
            taken = _ROWS_A_GROUP - num_waiting
            yield pa.concat_tables([*waiting, table.slice(0, taken)]).combine_chunks()
            table = table.slice(taken)
            waiting, num_waiting = [], 0
        if table.num_rows:
            waiting.append(table)
            num_waiting += table.num_rows
    if waiting:
        yield pa.concat_tables(waiting).combine_chunks()
