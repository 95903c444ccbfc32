"""Writes a new audit: the trace, its vocabulary and the record run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from trace_audit.errors import AuditDirError, RunFailedError
from trace_audit.storage.audit_dir import (
    AUDIT_NAME,
    RECORD_PARTIAL,
    RECORD_RUN,
    RUNS_NAME,
    TRACE_NAME,
    VOCABULARY_NAME,
    AuditDir,
    AuditInfo,
    is_audit,
)
from trace_audit.storage.files import (
    file_entry,
    remove,
    sealed,
    sync,
    write_atomically,
    write_json,
    writing,
)
from trace_audit.storage.lock import is_locked
from trace_audit.storage.recorded import TracePrompt, shard_sequences
from trace_audit.storage.row_order import check_row_order
from trace_audit.storage.run_files import VERSION_KEY, Attachments, build_run
from trace_audit.storage.schema import (
    FORMAT_VERSION,
    TOKENS_SCHEMA,
    TRACE_SCHEMA,
    VOCABULARY_SCHEMA,
)
from trace_audit.storage.shards import ShardWriter
from trace_audit.storage.swap import roll_back, swap_in
from trace_audit.storage.tables import fit, write_table
from trace_audit.storage.trace import TraceSequence, trace_digest, trace_table
from trace_audit.storage.vocabulary import vocabulary_table

__all__ = ["RecordInfo", "RecordWriter", "TracePrompt", "start_record"]

IMPORTED_RUN = "imported"
_PARTS = (TRACE_NAME, VOCABULARY_NAME, RUNS_NAME, "diffs")


@dataclass(frozen=True, kw_only=True)
class RecordInfo:
    """The part of audit.json that is known before the trace is; see :class:`AuditInfo`."""

    model: str
    model_path: str
    model_revision: str | None
    model_fingerprint: str
    tokenizer_fingerprint: str | None
    prompts_sha256: str
    vocabulary_size: int
    tokenizer_size: int | None
    seed: int
    sampling: Mapping[str, Any]


def start_record(path: Path, *, job_digest: str, num_shards: int, force: bool) -> RecordWriter:
    """Starts or resumes the record of an audit.

    Args:
        path: Must not exist, be empty, or hold an interrupted record; with `force` it may also
            hold an audit, which stays readable until the new one is complete.
        job_digest: Of everything that decides the record's bytes.
        num_shards: Of the whole record.
        force: Replace an audit, and discard an interrupted record of other settings.

    Raises:
        AuditDirError: Something else is there, another process writes it, or an audit or another
            interrupted record is there and `force` is not set.
        RunFailedError: The disk refused.
    """
    path = Path(path)
    check_record_target(path, force)
    return RecordWriter(path, job_digest=job_digest, num_shards=num_shards, force=force)


class RecordWriter(ShardWriter):
    """An unfinished record; made by :func:`start_record`.

    Unfinished work is kept inside the directory, so that it may be a mount point.
    """

    def __init__(self, path: Path, *, job_digest: str, num_shards: int, force: bool) -> None:
        self._path = path
        self._force = force
        self._is_new = not path.exists()
        self._imported: tuple[pa.Table, Mapping[str, Any]] | None = None
        super().__init__(
            path / RECORD_PARTIAL,
            job_digest=job_digest,
            num_shards=num_shards,
            force=force,
            subject=f"The record in {path}",
        )

    def add_imported_run(self, table: pa.Table, run_info: Mapping[str, Any]) -> None:
        """Adds the run named `imported`: logprobs that came with the tokens.

        Args:
            table: In `TOKENS_SCHEMA`, sorted by (sequence_index, step); see `imported_tokens`.
            run_info: What its run.json says.

        Raises:
            ValueError: The table is not a run's.
        """
        check_row_order(fit(table, TOKENS_SCHEMA))
        self._imported = (table, run_info)

    def finish(
        self,
        info: RecordInfo,
        prompts: Sequence[TracePrompt],
        *,
        token_bytes: Sequence[bytes],
        special: Sequence[bool],
        run_info: Mapping[str, Any],
        attachments: Attachments | None = None,
    ) -> AuditDir:
        """Writes trace, vocabulary and runs, and puts the audit in place, audit.json last.

        Args:
            info: What audit.json says besides the trace.
            prompts: One a sequence, in order of sequence_index.
            token_bytes: Of each id of the model's logits.
            special: Whether each id is a control token.
            run_info: What run.json of the record run says.
            attachments: Files beside the record run's rows.

        Returns:
            The complete audit.

        Raises:
            AuditDirError: A shard was damaged, or a run of the audit to replace is being written.
            RunFailedError: The disk refused, or the rows are not those of the prompts.
            ValueError: A shard is missing, or an info is no strict JSON.
        """
        if not len(token_bytes) == len(special) == info.vocabulary_size:
            raise ValueError("the vocabulary must have a row an id of the model's logits")
        staged = self._directory / "new"
        remove(staged)
        sequences = self._sequences(prompts)
        digest = trace_digest(sequences)
        self._build_runs(staged / RUNS_NAME, digest, run_info, attachments)
        _write(staged / TRACE_NAME, TRACE_SCHEMA, trace_table(sequences))
        _write(staged / VOCABULARY_NAME, VOCABULARY_SCHEMA, vocabulary_table(token_bytes, special))
        audit = AuditInfo(
            format_version=FORMAT_VERSION,
            trace_sha256=digest,
            num_sequences=len(sequences),
            num_output_tokens=sum(len(s.output_token_ids) for s in sequences),
            files={name: file_entry(staged / name) for name in (TRACE_NAME, VOCABULARY_NAME)},
            **asdict(info),
        )
        write_json(staged / AUDIT_NAME, sealed(audit.to_json()))
        self._check_no_writers()
        swap_in(staged, self._path, self._replaced, parts=_PARTS, marker=AUDIT_NAME)
        self._discard()
        return AuditDir.open(self._path)

    @property
    def _replaced(self) -> Path:
        return self._directory / "replaced"

    def _recover(self) -> None:
        roll_back(self._path, self._replaced, parts=_PARTS, marker=AUDIT_NAME)
        check_record_target(self._path, self._force)

    def _discard(self) -> None:
        super()._discard()
        if self._is_new and not any(self._path.iterdir()):
            with writing(self._path):
                self._path.rmdir()

    def _check_no_writers(self) -> None:
        for partial in sorted((self._path / RUNS_NAME).glob(".*.partial")):
            if is_locked(partial):
                name = partial.name.removeprefix(".").removesuffix(".partial")
                raise AuditDirError(
                    f"Run {name!r} of {self._path} is being written, so it cannot be replaced.",
                    hint="Wait until it ends, then repeat the command: its work is kept.",
                )

    def _build_runs(
        self,
        runs: Path,
        digest: str,
        run_info: Mapping[str, Any],
        attachments: Attachments | None,
    ) -> None:
        tables = (shard.tokens for shard in self.shards())
        build_run(
            runs / RECORD_RUN,
            RECORD_RUN,
            tables,
            trace_sha256=digest,
            run_info=run_info,
            counters=self.counters(),
            attachments=attachments,
        )
        if self._imported is not None:
            table, info = self._imported
            build_run(
                runs / IMPORTED_RUN,
                IMPORTED_RUN,
                [table],
                trace_sha256=digest,
                run_info=info,
                counters={"tokens": table.num_rows},
            )
        with writing(runs):
            sync(runs)

    def _sequences(self, prompts: Sequence[TracePrompt]) -> list[TraceSequence]:
        sequences: list[TraceSequence] = []
        for shard in self.shards():
            sequences += shard_sequences(shard, prompts, len(sequences))
        if len(sequences) != len(prompts):
            raise RunFailedError(
                f"{len(sequences)} sequences were recorded for {len(prompts)} prompts."
            )
        return sequences


def check_record_target(path: Path, force: bool) -> None:
    """Refuses what a record must not write into, before any work is done.

    Raises:
        AuditDirError: An audit is there and `force` is not set, or something that is no audit.
    """
    if is_audit(path):
        if not force:
            raise AuditDirError(
                f"{path} already holds an audit.",
                hint="Choose another directory, or replace the audit with --force.",
            )
        return
    if not path.exists() or (path / RECORD_PARTIAL).is_dir():
        return
    if not path.is_dir():
        raise AuditDirError(f"{path} is not a directory.", hint="Choose another path.")
    if any(path.iterdir()):
        raise AuditDirError(
            f"{path} is not empty and holds no audit, so nothing in it is touched.",
            hint="Choose a new or an empty directory.",
        )


def _write(path: Path, schema: pa.Schema, table: pa.Table) -> None:
    metadata = {VERSION_KEY: str(FORMAT_VERSION)}
    write_atomically(path, lambda to: write_table(to, schema, [table], metadata))
