"""Writes a run of an existing audit, a shard at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from trace_audit.errors import AuditDirError, RunFailedError
from trace_audit.storage.files import remove
from trace_audit.storage.run_files import RUN_NAME, Attachments, build_run
from trace_audit.storage.shards import ShardWriter
from trace_audit.storage.swap import roll_back, swap_in
from trace_audit.storage.trace import TraceSequence

if TYPE_CHECKING:
    from trace_audit.storage.audit_dir import AuditDir

_RESERVED = frozenset({"record", "imported"})
# Leaves room for "<candidate>-vs-<baseline>.parquet" in a file name of 255 bytes.
_MAX_NAME_BYTES = 100


class RunWriter(ShardWriter):
    """An unfinished run; it becomes visible when :meth:`finish` returns.

    Args:
        audit: The audit it belongs to.
        name: The run's name.
        job_digest: Of everything that decides the run's bytes.
        num_shards: Of the whole run.
        force: Replace a complete run of this name, and discard an interrupted one of other
            settings.

    Raises:
        AuditDirError: The name is taken or not usable, another process writes the run, or it was
            interrupted under other settings.
        RunFailedError: The disk refused.
    """

    def __init__(
        self, audit: AuditDir, name: str, *, job_digest: str, num_shards: int, force: bool
    ) -> None:
        check_run_name(name)
        self._audit = audit
        self._name = name
        self._force = force
        self._runs = audit.path / "runs"
        self._check_free()
        super().__init__(
            self._runs / f".{name}.partial",
            job_digest=job_digest,
            num_shards=num_shards,
            force=force,
            subject=f"Run {name!r} of {audit.path}",
        )

    def finish(
        self, run_info: Mapping[str, Any], *, attachments: Attachments | None = None
    ) -> Path:
        """Merges the shards and puts the run in place, instead of an old one if forced.

        Args:
            run_info: What run.json says besides files, counters, name and completeness. A
                `subset` lists the sequence ids of a run restricted on purpose.
            attachments: Files beside its rows.

        Returns:
            The run's directory.

        Raises:
            AuditDirError: The name was taken meanwhile, or a shard was damaged.
            RunFailedError: The disk refused, the audit was recorded anew meanwhile, or the rows
                are not the trace's.
            ValueError: A shard is missing, or `run_info` is no strict JSON.
        """
        self._check_audit()
        staged = self._directory / "new"
        remove(staged)
        build_run(
            staged / self._name,
            self._name,
            self._checked_tables(run_info.get("subset")),
            trace_sha256=self._audit.info.trace_sha256,
            run_info=run_info,
            counters=self.counters(),
            attachments=attachments,
        )
        self._check_free()
        swap_in(staged, self._runs, self._replaced, parts=(), marker=self._name)
        self._discard()
        return self._runs / self._name

    @property
    def _replaced(self) -> Path:
        return self._directory / "replaced"

    def _recover(self) -> None:
        roll_back(self._runs, self._replaced, parts=(), marker=self._name)
        self._check_free()

    def _check_free(self) -> None:
        target = self._runs / self._name
        if not target.exists():
            return
        if not self._force:
            raise AuditDirError(
                f"The audit {self._audit.path} already has a run {self._name!r}.",
                hint="Use another --name, or replace it with --force.",
            )
        if not (target / RUN_NAME).is_file():
            raise AuditDirError(
                f"{target} is not a run, so --force does not replace it.",
                hint="Use another --name, or move it away.",
            )

    def _check_audit(self) -> None:
        if type(self._audit).open(self._audit.path).info != self._audit.info:
            raise RunFailedError(
                f"The audit {self._audit.path} was recorded anew while run {self._name!r} ran.",
                hint="Replay again on the new trace.",
            )

    def _checked_tables(self, subset: list[str] | None) -> Iterator[pa.Table]:
        trace = self._audit.read_trace()
        seen: set[str] = set()
        for shard in self.shards():
            table = shard.tokens
            seen |= _check_rows(table, trace)
            yield table
        wanted = {s.sequence_id for s in trace} if subset is None else set(subset)
        if seen != wanted:
            raise RunFailedError(
                f"Run {self._name!r} has rows of {len(seen)} sequences, "
                f"{len(wanted)} were to be replayed."
            )


def check_run_name(name: str) -> None:
    """Holds a run's name to what can be a file name and is not one of the tool's own.

    Raises:
        AuditDirError: It cannot be used.
    """
    hint = "Use letters, digits, dots, dashes and underscores."
    if name in _RESERVED:
        raise AuditDirError(f"The run name {name!r} is kept for the recorded trace.", hint=hint)
    unusable = not name or name.startswith(".") or not name.isprintable() or set(name) & set("/\\")
    if unusable or len(name.encode()) > _MAX_NAME_BYTES:
        raise AuditDirError(
            f"{name!r} cannot be the name of a run: it must be a file name of 1 to "
            f"{_MAX_NAME_BYTES} bytes that does not start with a dot.",
            hint=hint,
        )


def _check_rows(table: pa.Table, trace: list[TraceSequence]) -> set[str]:
    """Holds a shard's rows to the trace; returns the sequence ids it has."""
    index = table["sequence_index"].to_numpy()
    starts = np.flatnonzero(np.diff(index, prepend=-1))
    seen = set()
    for start, end in zip(starts, [*starts[1:], len(index)], strict=True):
        if not 0 <= index[start] < len(trace):
            raise RunFailedError(f"A row has sequence index {index[start]}, outside the trace.")
        sequence = trace[index[start]]
        _check_sequence(table.slice(start, end - start), sequence)
        seen.add(sequence.sequence_id)
    return seen


def _check_sequence(rows: pa.Table, sequence: TraceSequence) -> None:
    step = rows["step"].to_numpy()
    length = len(sequence.output_token_ids)
    scored = np.ones(length, bool) if sequence.score_mask is None else sequence.score_mask
    inside = (step >= 0) & (step < length)
    missing = np.flatnonzero(scored & ~np.isin(np.arange(length), step))
    if not inside.all() or len(missing):
        raise RunFailedError(
            f"Sequence {sequence.sequence_id!r} came back with {len(step)} rows; its trace has "
            f"{length} tokens, {int(scored.sum())} of them scored."
        )
    wrong = rows["token_id"].to_numpy() != sequence.output_token_ids[step]
    wrong |= rows["position"].to_numpy() != len(sequence.prompt_token_ids) + step
    wrong |= rows["sequence_id"].to_numpy() != sequence.sequence_id
    if wrong.any():
        raise RunFailedError(
            f"Sequence {sequence.sequence_id!r} came back with another token, position or id "
            f"than its trace has at step {step[np.argmax(wrong)]}."
        )
