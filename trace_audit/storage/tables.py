"""Parquet files whose bytes depend on nothing but their content."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trace_audit.errors import AuditDirError

_COMPRESSION = "zstd"
_COMPRESSION_LEVEL = 3
# Everything else is close to unique a row, where a dictionary only costs.
_DICTIONARY_COLUMNS = ["sequence_index", "sequence_id", "phase", "group_id", "source"]


def write_table(
    path: Path, schema: pa.Schema, tables: Iterable[pa.Table], metadata: Mapping[str, str]
) -> None:
    """Writes tables as row groups, one a table that has rows.

    Chunking, dictionaries and pandas or Arrow metadata of the tables do not reach the file: equal
    content gives equal bytes.

    Args:
        path: The file to write.
        schema: Of every table.
        tables: Consumed one at a time.
        metadata: All the key-value metadata that the file gets.

    Raises:
        OSError: The disk refused.
        ValueError: A table does not fit the schema.
    """
    stored = _stored_schema(schema)
    with pq.ParquetWriter(
        path,
        stored,
        version="2.6",
        compression=_COMPRESSION,
        compression_level=_COMPRESSION_LEVEL,
        use_dictionary=[name for name in _DICTIONARY_COLUMNS if name in schema.names],
        store_schema=False,
    ) as writer:
        for table in tables:
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


def check_row_order(table: pa.Table) -> None:
    """Holds a table to rows sorted by (sequence_index, step), none twice.

    Raises:
        ValueError: They are not.
    """
    keys = table["sequence_index"].to_numpy().astype(np.int64) << 32
    keys += table["step"].to_numpy().astype(np.int64)
    if (np.diff(keys) <= 0).any():
        row = int(np.argmax(np.diff(keys) <= 0)) + 1
        raise ValueError(f"row {row} is not after the row before it")


def read_table(path: Path, schema: pa.Schema) -> tuple[pa.Table, dict[str, str]]:
    """Reads a file that :func:`write_table` wrote.

    Returns:
        The table in `schema`, and the file's key-value metadata.

    Raises:
        AuditDirError: It cannot be read, or its columns are not the schema's.
    """
    with reading(path), pq.ParquetFile(path) as file:
        if not file.schema_arrow.equals(_stored_schema(schema)):
            raise AuditDirError(
                f"{path} does not have the columns of this format.",
                hint="It was written by something else; record or replay again.",
            )
        return file.read().cast(schema), _decoded(file.metadata)


def read_metadata(path: Path) -> dict[str, str]:
    """The key-value metadata of a file that :func:`write_table` wrote.

    Raises:
        AuditDirError: It cannot be read.
    """
    with reading(path):
        return _decoded(pq.read_metadata(path))


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
