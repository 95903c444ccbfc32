"""The two files of a complete run, and how they are built."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa

from trace_audit.storage.files import (
    file_entry,
    sealed,
    sync,
    write_atomically,
    write_json,
    writing,
)
from trace_audit.storage.schema import FORMAT_VERSION, OPTIONAL_FIELDS, TOKENS_SCHEMA
from trace_audit.storage.tables import write_table

TOKENS_NAME = "tokens.parquet"
RUN_NAME = "run.json"
VERSION_KEY = "format_version"
TRACE_KEY = "trace_sha256"

Attachments: TypeAlias = Mapping[str, Callable[[Path, Mapping[str, str]], object]]
"""Name of a file beside tokens.parquet -> what writes it, given its path and its metadata."""


def build_run(
    directory: Path,
    name: str,
    tables: Iterable[pa.Table],
    *,
    trace_sha256: str,
    run_info: Mapping[str, Any],
    counters: Mapping[str, int],
    attachments: Attachments | None = None,
) -> None:
    """Writes a run into a new directory that nobody reads yet.

    Args:
        directory: Made here.
        name: The run's name.
        tables: In `TOKENS_SCHEMA`, the same optional fields behind it, a row group each.
        trace_sha256: Digest of the trace that the run scored.
        run_info: What run.json says besides files, counters and completeness.
        counters: Counters added up over the run.
        attachments: Files beside its rows; they get the metadata of tokens.parquet.

    Raises:
        RunFailedError: The disk refused.
        ValueError: A table does not fit, or `run_info` is no strict JSON.
    """
    with writing(directory):
        directory.mkdir(parents=True)
    tokens = directory / TOKENS_NAME
    metadata = {VERSION_KEY: str(FORMAT_VERSION), TRACE_KEY: trace_sha256}
    write_atomically(
        tokens,
        lambda to: write_table(to, TOKENS_SCHEMA, tables, metadata, optional=OPTIONAL_FIELDS),
    )
    files = {TOKENS_NAME: file_entry(tokens)}
    for attached, write in (attachments or {}).items():
        path = directory / attached
        write_atomically(path, partial(_with_metadata, write, metadata))
        files[attached] = file_entry(path)
    computed = {
        "format_version": FORMAT_VERSION,
        "name": name,
        "files": files,
        "counters": {**run_info.get("counters", {}), **counters},
        "complete": True,
    }
    write_json(directory / RUN_NAME, sealed({**run_info, **computed}))
    with writing(directory):
        sync(directory)


def _with_metadata(
    write: Callable[[Path, Mapping[str, str]], object], metadata: Mapping[str, str], path: Path
) -> None:
    write(path, metadata)
