"""One writer a directory."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from trace_audit.errors import AuditDirError
from trace_audit.storage.files import writing

LOCK_NAME = "lock"


class DirectoryLock:
    """An exclusive lock on a directory of unfinished work, held until released or the process ends.

    Args:
        directory: Made if it is missing, its parents too.
        subject: What is locked, for the message: "Run 'x'".

    Raises:
        AuditDirError: Another writer holds it.
        RunFailedError: The directory cannot be made or locked.
    """

    def __init__(self, directory: Path, *, subject: str) -> None:
        with writing(directory):
            descriptor = None
            while descriptor is None:
                descriptor = _try_lock(directory, subject)
        self._descriptor = descriptor

    def release(self) -> None:
        """Lets another writer in."""
        os.close(self._descriptor)


def is_locked(directory: Path) -> bool:
    """Whether a writer holds a directory's lock at this moment."""
    try:
        # For reading: an audit may be on a disk that takes no writes.
        descriptor = os.open(directory / LOCK_NAME, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _try_lock(directory: Path, subject: str) -> int | None:
    """A locked descriptor, or None if the last writer removed the directory meanwhile."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / LOCK_NAME
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A writer that finished just now has unlinked the file that was opened here.
        if path.exists() and os.fstat(descriptor).st_ino == path.stat().st_ino:
            return descriptor
    except BlockingIOError as error:
        os.close(descriptor)
        raise AuditDirError(
            f"{subject} is being written by another process.",
            hint="Wait until it ends, or use another name.",
        ) from error
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None
