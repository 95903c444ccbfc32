"""Reads a complete audit directory; nothing that does not match is handed out."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from trace_audit.errors import AuditDirError, InvalidComparisonError
from trace_audit.storage.audit_info import (
    AUDIT_NAME,
    RECORD_PARTIAL,
    AuditInfo,
    check_version,
    read_audit_info,
)
from trace_audit.storage.files import check_file, read_json, unsealed
from trace_audit.storage.run_files import RUN_NAME, TOKENS_NAME, TRACE_KEY, VERSION_KEY
from trace_audit.storage.schema import (
    FORMAT_NAME,
    OPTIONAL_FIELDS,
    TOKENS_SCHEMA,
    VOCABULARY_SCHEMA,
)
from trace_audit.storage.tables import read_metadata, read_table
from trace_audit.storage.token_file import TokenFile
from trace_audit.storage.trace import TraceSequence
from trace_audit.storage.trace_file import TraceFile
from trace_audit.storage.vocabulary import Vocabulary

if TYPE_CHECKING:
    from trace_audit.storage.run_writer import RunWriter

__all__ = [
    "AUDIT_NAME",
    "RECORD_PARTIAL",
    "AuditDir",
    "AuditInfo",
    "TraceSequence",
    "Vocabulary",
]

TRACE_NAME = "trace.parquet"
VOCABULARY_NAME = "vocabulary.parquet"
RUNS_NAME = "runs"
RECORD_RUN = "record"


class AuditDir:
    """An existing, complete audit; made by :meth:`open`.

    Attributes:
        path: The directory.
        info: Its audit.json.
    """

    def __init__(self, path: Path, info: AuditInfo) -> None:
        self.path = path
        self.info = info

    @classmethod
    def open(cls, path: Path) -> AuditDir:
        """Opens an audit.

        Raises:
            AuditDirError: It is missing, no audit, an interrupted record, of a newer format, or
                damaged.
        """
        path = Path(path)
        return cls(path, read_audit_info(path))

    def open_trace(self) -> TraceFile:
        """Opens the trace, to be read a few sequences at a time.

        Raises:
            AuditDirError: It is missing or damaged.
        """
        path = self.path / TRACE_NAME
        check_file(path, self.info.files.get(TRACE_NAME))
        return TraceFile(path, self.info.trace_sha256)

    def read_trace(self) -> list[TraceSequence]:
        """Reads the whole trace, in the order of the prompts file.

        Raises:
            AuditDirError: It is missing, damaged, or not the trace that audit.json names.
        """
        return list(self.open_trace().sequences())

    def vocabulary(self) -> Vocabulary:
        """Reads the bytes of every token id.

        Raises:
            AuditDirError: It is missing or damaged.
        """
        table = self._read(VOCABULARY_NAME, VOCABULARY_SCHEMA)
        try:
            vocabulary = Vocabulary(table)
        except ValueError as error:
            raise AuditDirError(f"{self.path / VOCABULARY_NAME} is damaged: {error}.") from error
        if vocabulary.size != self.info.vocabulary_size:
            raise AuditDirError(
                f"{self.path / VOCABULARY_NAME} has {vocabulary.size} ids, the model has "
                f"{self.info.vocabulary_size}."
            )
        return vocabulary

    def run_names(self) -> list[str]:
        """Names of the complete runs, sorted, `record` first."""
        directory = self.path / RUNS_NAME
        if not directory.is_dir():
            return []
        names = [
            path.name
            for path in directory.iterdir()
            if not path.name.startswith(".") and (path / RUN_NAME).is_file()
        ]
        return sorted(names, key=lambda name: (name != RECORD_RUN, name))

    def damaged_run_names(self) -> list[str]:
        """Names of directories that stand among the runs and are none, sorted."""
        return [
            path.name
            for path in sorted((self.path / RUNS_NAME).glob("[!.]*"))
            if not (path / RUN_NAME).is_file()
        ]

    def run_info(self, name: str) -> dict[str, Any]:
        """Reads run.json of a run.

        Raises:
            AuditDirError: There is no such run, it is incomplete, of a newer format, or damaged.
        """
        names = self.run_names()
        if name not in names:
            raise AuditDirError(
                f"The audit {self.path} has no run {name!r}.", hint=self._hint(name, names)
            )
        path = self.path / RUNS_NAME / name / RUN_NAME
        info = read_json(path)
        check_version(path, info.get("format_version"))
        info = unsealed(path, info)
        if info.get("name") != name:
            raise AuditDirError(f"{path} is that of run {info.get('name')!r}.")
        if info.get("complete") is not True:
            raise AuditDirError(f"{path} does not say that the run is complete.")
        return info

    def open_tokens(self, name: str) -> TokenFile:
        """Opens a run's rows, sorted by (sequence_index, step), to be read in pieces.

        Raises:
            AuditDirError: Size, sha256, columns, format version or row order do not match.
            InvalidComparisonError: The run scored another trace.
        """
        info = self.run_info(name)
        path = self.path / RUNS_NAME / name / TOKENS_NAME
        check_file(path, _file(info, TOKENS_NAME))
        self.check_metadata(name, path, read_metadata(path))
        return TokenFile(path)

    def read_tokens(self, name: str) -> pa.Table:
        """Reads all of a run's rows in `TOKENS_SCHEMA`, with the optional fields that it has.

        Raises what :meth:`open_tokens` does.
        """
        self.open_tokens(name)
        path = self.path / RUNS_NAME / name / TOKENS_NAME
        return read_table(path, TOKENS_SCHEMA, optional=OPTIONAL_FIELDS)[0]

    def run_directory(self, name: str) -> Path:
        """Where the files of a run are."""
        return self.path / RUNS_NAME / name

    def check_metadata(self, run: str, path: Path, metadata: Mapping[str, str]) -> None:
        """Holds a run's file to this format and to this audit's trace.

        Raises:
            AuditDirError: It is of a newer format, or states none.
            InvalidComparisonError: It is of another trace.
        """
        check_version(path, metadata.get(VERSION_KEY))
        if metadata.get(TRACE_KEY) != self.info.trace_sha256:
            raise InvalidComparisonError(
                f"Run {run!r} scored another trace than this audit's.",
                hint="Files of two audits were mixed; replay the run on this audit.",
            )

    def run_writer(self, name: str, *, job_digest: str, num_shards: int, force: bool) -> RunWriter:
        """Starts or resumes a run; see :class:`RunWriter`.

        Raises:
            AuditDirError: The name is taken or not usable, another process writes the run, or it
                was interrupted under other settings.
            RunFailedError: The disk refused.
        """
        from trace_audit.storage.run_writer import RunWriter

        return RunWriter(self, name, job_digest=job_digest, num_shards=num_shards, force=force)

    def verify(self) -> list[str]:
        """Checks every file; a sentence a problem, none if all is well."""
        from trace_audit.storage.exact_files import open_full_logprobs, read_exact_kl

        problems = [
            f"{self.path / RUNS_NAME / name} has no {RUN_NAME}."
            for name in self.damaged_run_names()
        ]
        if not (self.path / RUNS_NAME / RECORD_RUN).is_dir():
            problems.append(f"{self.path} has no run {RECORD_RUN!r}.")
        checks: list[Callable[[], object]] = [self._pass_trace, self.vocabulary]
        for name in self.run_names():
            checks.append(partial(self._pass_tokens, name))
            checks += [partial(read, self, name) for read in (read_exact_kl, open_full_logprobs)]
        for check in checks:
            try:
                check()
            except (AuditDirError, InvalidComparisonError) as error:
                problems.append(error.message)
        # A damaged run.json is met once a file of its run.
        return list(dict.fromkeys(problems))

    def _pass_trace(self) -> None:
        """Reads the whole trace and keeps nothing."""
        for _ in self.open_trace().sequences():
            pass

    def _pass_tokens(self, name: str) -> None:
        """Reads all rows of a run and keeps none."""
        tokens = self.open_tokens(name)
        for _ in tokens.pieces(tokens.column_names):
            pass

    def _read(self, name: str, schema: pa.Schema) -> pa.Table:
        path = self.path / name
        check_file(path, self.info.files.get(name))
        return read_table(path, schema)[0]

    def _hint(self, name: str, names: list[str]) -> str:
        if (self.path / RUNS_NAME / f".{name}.partial").is_dir():
            return "It was interrupted; run its replay again to finish it."
        near = difflib.get_close_matches(name, names, n=1)
        if near:
            return f"Did you mean {near[0]!r}?"
        return f"Its runs are {', '.join(names)}." if names else "Replay one first."


def is_audit(path: Path) -> bool:
    """Whether a directory holds an audit of this or another format version, damaged or not."""
    try:
        value = json.loads((path / AUDIT_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError, RecursionError):
        # Not ours for certain, so nothing may be deleted on the strength of it.
        return False
    return isinstance(value, dict) and value.get("format") == FORMAT_NAME


def _file(info: Mapping[str, Any], name: str) -> object:
    files = info.get("files")
    return files.get(name) if isinstance(files, Mapping) else None
