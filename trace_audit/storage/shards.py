"""Finished pieces of a run, kept until the run is whole: the unit of resume."""

from __future__ import annotations

import errno
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa

from trace_audit.errors import AuditDirError
from trace_audit.storage.files import (
    check_file,
    file_entry,
    read_json,
    remove,
    write_atomically,
    write_json,
    writing,
)
from trace_audit.storage.lock import LOCK_NAME, DirectoryLock
from trace_audit.storage.row_order import check_row_order
from trace_audit.storage.schema import (
    FORMAT_VERSION,
    OPTIONAL_FIELDS,
    SHARD_SCHEMA,
    with_optional,
)
from trace_audit.storage.tables import (
    fit,
    read_metadata,
    read_table,
    write_table,
)

_JOB_NAME = "job.json"


def plan_shards(num_sequences: int, shard_size: int) -> list[range]:
    """Cuts sequences 0 to num_sequences - 1 into fixed groups, the last one possibly smaller.

    Args:
        num_sequences: At least 1.
        shard_size: Sequences a shard, at least 1.
    """
    assert num_sequences >= 1
    assert shard_size >= 1
    return [
        range(start, min(start + shard_size, num_sequences))
        for start in range(0, num_sequences, shard_size)
    ]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A finished shard, as its writer left it.

    Attributes:
        table: In `SHARD_SCHEMA`, optional fields behind it, sorted by (sequence_index, step).
        counters: What the engine counted.
        finish_reasons: One a sequence, in order of sequence_index.
    """

    table: pa.Table
    counters: dict[str, int]
    finish_reasons: list[str]

    @property
    def tokens(self) -> pa.Table:
        """The part of the table that a run keeps: in `TOKENS_SCHEMA`, optional fields behind it."""
        return self.table.drop_columns(["support_token_ids"])


class ShardWriter:
    """A locked directory of finished shards of one job; a context manager.

    Leaving it before `finish` keeps the finished shards for a later attempt.

    Args:
        directory: Where unfinished work is kept.
        job_digest: Of everything that decides the shards' bytes.
        num_shards: Of the whole job.
        force: Discard the shards of another job.
        subject: What is written, for messages: "Run 'x'".

    Raises:
        AuditDirError: Another process writes it, or another job's shards are there.
        RunFailedError: The disk refused.
    """

    def __init__(
        self, directory: Path, *, job_digest: str, num_shards: int, force: bool, subject: str
    ) -> None:
        assert num_shards >= 1
        self.num_shards = num_shards
        self._directory = directory
        self._subject = subject
        self._lock = DirectoryLock(directory, subject=subject)
        self._entries: dict[int, dict[str, Any]] = {}
        self._is_done = False
        try:
            self._recover()
            self._claim(job_digest, force)
        except BaseException:
            self._lock.release()
            raise

    @property
    def finished_shards(self) -> frozenset[int]:
        """Indices of the shards that need no work."""
        return frozenset(self._entries)

    @property
    def finished_tokens(self) -> int:
        """Rows of the finished shards."""
        return sum(entry["rows"] for entry in self._entries.values())

    @property
    def engine_seconds(self) -> float:
        """Engine time of the finished shards, those of earlier attempts included."""
        return float(sum(entry["engine_seconds"] for entry in self._entries.values()))

    def write_shard(
        self,
        index: int,
        table: pa.Table,
        *,
        counters: Mapping[str, int],
        finish_reasons: Sequence[str],
        engine_seconds: float = 0.0,
        attach: Callable[[Path], object] | None = None,
    ) -> None:
        """Keeps a finished shard; once this returns, it survives a crash.

        Args:
            index: Of the shard, not finished yet.
            table: In `SHARD_SCHEMA`, optional fields behind it, sorted by (sequence_index, step).
            counters: Added up over shards when the run is finished.
            finish_reasons: One a sequence, in order.
            engine_seconds: Time spent; kept apart from the bytes of the run.
            attach: Writes what else the shard keeps, at the path it is given; see `attachment`.

        Raises:
            RunFailedError: The disk refused.
            ValueError: The table is not a shard.
        """
        if index in self._entries or not 0 <= index < self.num_shards:
            raise ValueError(f"shard {index} of {self.num_shards} is finished or does not exist")
        schema = with_optional(SHARD_SCHEMA, table.column_names, OPTIONAL_FIELDS)
        rows = fit(table, schema)
        check_row_order(rows)
        if len(finish_reasons) != len(np.unique(rows["sequence_index"].to_numpy())):
            raise ValueError("a shard needs one finish reason a sequence")
        metadata = {
            "format_version": str(FORMAT_VERSION),
            "counters": json.dumps(dict(counters), sort_keys=True),
            "finish_reasons": json.dumps(list(finish_reasons)),
        }
        path = self._shard_path(index)
        write_atomically(path, lambda to: write_table(to, schema, [rows], metadata))
        entry: dict[str, Any] = {
            **file_entry(path),
            "engine_seconds": float(engine_seconds),
            "rows": rows.num_rows,
        }
        if attach is not None:
            write_atomically(_attachment_path(path), attach)
            entry["attachment"] = file_entry(_attachment_path(path))
        # Last: a shard without its sidecar does not count.
        write_json(_sidecar_path(path), entry)
        self._entries[index] = entry

    def read_shard(self, index: int) -> Shard:
        """Reads a finished shard back.

        Raises:
            AuditDirError: It was damaged since.
        """
        path = self._shard_path(index)
        check_file(path, self._entries[index])
        table, metadata = read_table(path, SHARD_SCHEMA, optional=OPTIONAL_FIELDS)
        return Shard(
            table=table,
            counters=json.loads(metadata["counters"]),
            finish_reasons=json.loads(metadata["finish_reasons"]),
        )

    def attachment(self, index: int) -> Path:
        """What else a finished shard keeps, as its `attach` wrote it.

        Raises:
            AuditDirError: It was damaged since.
        """
        path = _attachment_path(self._shard_path(index))
        check_file(path, self._entries[index]["attachment"])
        return path

    def shards(self) -> Iterator[Shard]:
        """Every shard in order, one in memory at a time.

        Raises:
            AuditDirError: One was damaged, or two overlap.
            ValueError: One is not finished.
        """
        missing = sorted(set(range(self.num_shards)) - self.finished_shards)
        if missing:
            raise ValueError(f"shards {missing} are not finished")
        last = -1
        for index in range(self.num_shards):
            shard = self.read_shard(index)
            if shard.table.num_rows:
                indices = shard.table["sequence_index"]
                if indices[0].as_py() <= last:
                    raise ValueError(f"shard {index} does not start after the shard before it")
                last = indices[-1].as_py()
            yield shard

    def counters(self) -> dict[str, int]:
        """Counters added up over the finished shards."""
        total: Counter[str] = Counter()
        for index in sorted(self._entries):
            total.update(json.loads(read_metadata(self._shard_path(index))["counters"]))
        return dict(total)

    def close(self) -> None:
        """Lets go of the directory; what is finished stays for a later attempt."""
        try:
            if not self._is_done and not self._entries:
                self._discard()
        finally:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _recover(self) -> None:
        """Undoes what a writer that died while putting its result in place left behind."""

    def _discard(self) -> None:
        """Removes the directory, which holds nothing of use any more."""
        self._clear(keep=set())
        with writing(self._directory):
            # Last, so that nobody else starts in a directory that is still being emptied.
            (self._directory / LOCK_NAME).unlink()
            try:
                self._directory.rmdir()
            except OSError as error:
                # Another writer has moved in since the lock file went.
                if error.errno != errno.ENOTEMPTY:
                    raise
        self._is_done = True

    def _claim(self, job_digest: str, force: bool) -> None:
        job = {
            "format_version": FORMAT_VERSION,
            "job_digest": job_digest,
            "num_shards": self.num_shards,
        }
        entries = self._valid_entries()
        if self._job() == job:
            self._entries = entries
            shards = [self._shard_path(index) for index in entries]
            beside = [f(p) for p in shards for f in (_sidecar_path, _attachment_path)]
            self._clear(keep={_JOB_NAME, *(path.name for path in [*shards, *beside])})
            return
        if entries and not force:
            raise AuditDirError(
                f"{self._subject} was interrupted under other settings, and {len(entries)} of its "
                "shards are finished.",
                hint="Repeat the command that was interrupted, or discard its work with --force.",
            )
        self._clear(keep=set())
        write_json(self._directory / _JOB_NAME, job)

    def _job(self) -> dict[str, Any] | None:
        try:
            return read_json(self._directory / _JOB_NAME)
        except AuditDirError:
            # Missing or half-written: nothing was finished under it.
            return None

    def _valid_entries(self) -> dict[int, dict[str, Any]]:
        entries = {}
        for path in sorted(self._directory.glob("shard-*.json")):
            number = path.stem.removeprefix("shard-")
            try:
                entry = read_json(path)
                check_file(path.with_suffix(".parquet"), entry)
                if "attachment" in entry:
                    check_file(_attachment_path(path), entry["attachment"])
            except AuditDirError:
                # Damaged or half there: the shard is done again.
                continue
            if number.isdecimal() and {"rows", "engine_seconds"} <= entry.keys():
                entries[int(number)] = entry
        return entries

    def _clear(self, *, keep: Set[str]) -> None:
        for path in sorted(self._directory.iterdir()):
            if path.name not in keep and path.name != LOCK_NAME:
                remove(path)

    def _shard_path(self, index: int) -> Path:
        return self._directory / f"shard-{index:06d}.parquet"


def _sidecar_path(shard: Path) -> Path:
    return shard.with_suffix(".json")


def _attachment_path(shard: Path) -> Path:
    return shard.with_suffix(".attachment")
