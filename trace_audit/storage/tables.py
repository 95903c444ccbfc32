"""Parquet files whose bytes depend on nothing but their content."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trace_audit.errors import AuditDirError
from trace_audit.storage.schema import with_optional

_COMPRESSION = "zstd"
_COMPRESSION_LEVEL = 3
# Everything else is close to unique a row, where a dictionary only costs.
_DICTIONARY_COLUMNS = ["sequence_index", "sequence_id", "phase", "group_id", "source"]
# Ids in ascending lists, whose steps are small.
_DELTA_COLUMNS = ["expert_ids"]
# Rows decoded at once, and bytes read at once of each column: what streaming holds of a file.
_BATCH_ROWS = 16_384
_BUFFER_BYTES = 1 << 18


def write_table(
    path: Path,
    schema: pa.Schema,
    tables: Iterable[pa.Table],
    metadata: Mapping[str, str],
    *,
    optional: Sequence[pa.Field] = (),
) -> None:
    """Writes tables as row groups, one a table that has rows.

    Chunking, dictionaries and pandas or Arrow metadata of the tables do not reach the file: equal
    content gives equal bytes.

    Args:
        path: The file to write.
        schema: Of every table.
        tables: Consumed one at a time.
        metadata: All the key-value metadata that the file gets.
        optional: Fields that the file gets too where the first table has them.

    Raises:
        OSError: The disk refused.
        ValueError: A table does not fit the schema.
    """
    rest = iter(tables)
    first = next(rest, schema.empty_table())
    schema = with_optional(schema, first.column_names, optional)
    stored = _stored_schema(schema)
    with pq.ParquetWriter(
        path,
        stored,
        version="2.6",
        compression=_COMPRESSION,
        compression_level=_COMPRESSION_LEVEL,
        use_dictionary=[name for name in _DICTIONARY_COLUMNS if name in schema.names],
        column_encoding={
            f"{name}.list.element": "DELTA_BINARY_PACKED"
            for name in _DELTA_COLUMNS
            if name in schema.names
        },
        store_schema=False,
    ) as writer:
        for table in chain([first], rest):
            if table.num_rows:
                rows = fit(table, schema).cast(stored).combine_chunks()
                writer.write_table(rows, row_group_size=rows.num_rows)
        writer.add_key_value_metadata(dict(metadata))


def fit(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table with exactly the schema's columns, in its order and types.

    Raises:
        ValueError: A column is missing, unknown, of another type, or null where that is not
            allowed.
    """
    if set(table.column_names) != set(schema.names) or table.num_columns != len(schema):
        missing = sorted(set(schema.names) - set(table.column_names))
        unknown = sorted(set(table.column_names) - set(schema.names))
        raise ValueError(f"columns missing: {missing}, unknown: {unknown}")
    for field in schema:
        column = table[field.name]
        if not column.type.equals(field.type):
            raise ValueError(f"column {field.name} is {column.type}, not {field.type}")
        if column.null_count and not field.nullable:
            raise ValueError(f"column {field.name} must not be null")
    return pa.table([table[name] for name in schema.names], schema=schema)


def read_table(
    path: Path, schema: pa.Schema, *, optional: Sequence[pa.Field] = ()
) -> tuple[pa.Table, dict[str, str]]:
    """Reads a file that :func:`write_table` wrote.

    Returns:
        The table in `schema`, behind it the optional fields that the file has; its key-value
        metadata.

    Raises:
        AuditDirError: It cannot be read, or its columns are not the schema's.
    """
    with reading(path), pq.ParquetFile(path) as file:
        schema = _checked_schema(path, file, schema, optional)
        return file.read().cast(schema), _decoded(file.metadata)


class StoredTable:
    """A file that :func:`write_table` wrote, read in pieces.

    Attributes:
        path: The file.
        num_rows: Its rows.
        column_names: Its columns.
        metadata: Its key-value metadata.
    """

    def __init__(self, path: Path, schema: pa.Schema, *, optional: Sequence[pa.Field] = ()) -> None:
        """Looks at the file's columns and metadata.

        Raises:
            AuditDirError: It cannot be read, or its columns are not the schema's.
        """
        self.path = path
        with reading(path), pq.ParquetFile(path) as file:
            schema = _checked_schema(path, file, schema, optional)
            self.metadata = _decoded(file.metadata)
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        self._starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self.num_rows = int(self._starts[-1])
        self.column_names: tuple[str, ...] = tuple(schema.names)
        # Repeated strings as numbers of a dictionary: the schema's type, and cheap.
        self._dictionaries = [n for n in ("phase", "sequence_id") if n in schema.names]

    def slices(
        self, ranges: Sequence[range], columns: Sequence[str], *, batch_rows: int = _BATCH_ROWS
    ) -> Iterator[pa.Table]:
        """Rows of ascending ranges that do not overlap, a table each.

        What is in memory is one range's rows and one batch of the file; row groups without a wanted
        row are not read. Strings come as dictionaries.

        Args:
            ranges: Inside [0, num_rows).
            columns: Names of the columns that are read.
            batch_rows: Rows of the file decoded at once.

        Raises:
            AuditDirError: The file cannot be read.
        """
        with reading(self.path), self._open() as file:
            schema = pa.schema([file.schema_arrow.field(name) for name in columns])
            for stretch, (first, last) in self._stretches(ranges):
                batches = file.iter_batches(
                    batch_size=batch_rows,
                    row_groups=list(range(first, last)),
                    columns=list(columns),
                )
                rows = _Rows(batches, schema, at=int(self._starts[first]))
                for wanted in stretch:
                    yield rows.take(wanted)

    def _open(self) -> pq.ParquetFile:
        # Left to its default, the reader holds the whole file by the time it has read it.
        return pq.ParquetFile(
            self.path,
            buffer_size=_BUFFER_BYTES,
            pre_buffer=False,
            read_dictionary=self._dictionaries,
        )

    def _stretches(self, ranges: Sequence[range]) -> Iterator[tuple[list[range], tuple[int, int]]]:
        """Ranges with their row groups, cut where there are row groups that nobody wants."""
        stretch: list[range] = []
        first = last = 0
        for rows in ranges:
            start = int(np.searchsorted(self._starts, rows.start, side="right")) - 1
            end = int(np.searchsorted(self._starts, rows.stop, side="left"))
            if stretch and start > last:
                yield stretch, (first, last)
                stretch = []
            if not stretch:
                first = last = min(start, len(self._starts) - 1)
            stretch.append(rows)
            last = max(last, end)
        if stretch:
            yield stretch, (first, last)


class _Rows:
    """Takes rows off a stream of batches, in order."""

    def __init__(self, batches: Iterator[pa.RecordBatch], schema: pa.Schema, *, at: int) -> None:
        """Starts where the first batch does, which is row ``at``."""
        self._batches = batches
        self._held: list[pa.RecordBatch] = []
        self._empty = schema.empty_table()
        self._at = at

    def take(self, rows: range) -> pa.Table:
        """The rows of a range that starts here or later; what is before it is dropped."""
        for _ in self._pieces(rows.start - self._at):
            pass
        pieces = list(self._pieces(len(rows)))
        return pa.Table.from_batches(pieces) if pieces else self._empty

    def _pieces(self, count: int) -> Iterator[pa.RecordBatch]:
        self._at += count
        while count:
            if not self._held:
                self._held.append(next(self._batches))
            piece = self._held[0].slice(0, count)
            rest = self._held.pop().slice(len(piece))
            if len(rest):
                self._held.append(rest)
            count -= len(piece)
            yield piece


def read_metadata(path: Path) -> dict[str, str]:
    """The key-value metadata of a file that :func:`write_table` wrote.

    Raises:
        AuditDirError: It cannot be read.
    """
    with reading(path):
        return _decoded(pq.read_metadata(path))


def _checked_schema(
    path: Path, file: pq.ParquetFile, schema: pa.Schema, optional: Sequence[pa.Field]
) -> pa.Schema:
    """The schema with the optional fields that the file has."""
    schema = with_optional(schema, file.schema_arrow.names, optional)
    if not file.schema_arrow.equals(_stored_schema(schema)):
        raise AuditDirError(
            f"{path} does not have the columns of this format.",
            hint="It was written by something else; record or replay again.",
        )
    return schema


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns an error of reading Parquet into one sentence that names the file.

    Raises:
        AuditDirError: The body raised an OSError or an ArrowException.
    """
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise AuditDirError(f"{path} cannot be read as Parquet: {reason}.") from error


def _decoded(metadata: pq.FileMetaData) -> dict[str, str]:
    return {key.decode(): value.decode() for key, value in (metadata.metadata or {}).items()}


def _stored_schema(schema: pa.Schema) -> pa.Schema:
    """The schema with dictionaries as their values: Parquet makes its own."""
    fields = [
        field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field
        for field in schema
    ]
    return pa.schema(fields)
