"""Runs of an audit that were begun and are not complete."""

from __future__ import annotations

from dataclasses import dataclass

from trace_audit.storage.audit_dir import RUNS_NAME, AuditDir
from trace_audit.storage.lock import is_locked

_PREFIX, _SUFFIX = ".", ".partial"


@dataclass(frozen=True, kw_only=True)
class UnfinishedRuns:
    """Names, sorted.

    Attributes:
        running: another process writes them at this moment.
        interrupted: nobody does; their finished shards wait to be resumed.
    """

    running: tuple[str, ...]
    interrupted: tuple[str, ...]


def unfinished_runs(audit: AuditDir) -> UnfinishedRuns:
    """Find the runs that an audit does not show yet."""
    found: dict[bool, list[str]] = {True: [], False: []}
    for path in sorted((audit.path / RUNS_NAME).glob(f"{_PREFIX}*{_SUFFIX}")):
        found[is_locked(path)].append(path.name[len(_PREFIX) : -len(_SUFFIX)])
    return UnfinishedRuns(running=tuple(found[True]), interrupted=tuple(found[False]))
