"""Files that are either whole or absent, and directories that survive a power cut."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trace_audit.errors import AuditDirError, RunFailedError

_TEMPORARY_PREFIX = ".writing-"
_SEAL_KEY = "sha256"
_FULL = {errno.ENOSPC, errno.EDQUOT}


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Turns an operating system's error into one sentence that names what was being written.

    Raises:
        RunFailedError: The body raised an OSError.
    """
    try:
        yield
    except OSError as error:
        hint = "Check the permissions and the disk, then run the same command again to resume."
        if error.errno in _FULL:
            hint = "Free some space, then run the same command again to resume."
        # pyarrow's errors carry their reason in the message only, which spans several lines.
        reason = os.strerror(error.errno) if error.errno else str(error).splitlines()[0]
        raise RunFailedError(
            f"{target} could not be written: {reason[:1].lower()}{reason[1:]}.", hint=hint
        ) from error


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file under a temporary name, syncs it and renames it into place.

    Args:
        path: Where the file will be; replaced if it exists.
        write: Called with the temporary path.

    Raises:
        RunFailedError: The disk refused. Nothing is left behind.
    """
    temporary = path.with_name(f"{_TEMPORARY_PREFIX}{path.name}")
    with writing(path):
        try:
            write(temporary)
            sync(temporary)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync(path.parent)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes strict JSON (no NaN) with sorted keys, atomically.

    Raises:
        RunFailedError: The disk refused.
        ValueError: A number is not finite.
    """
    text = json.dumps(value, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=True) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        AuditDirError: It cannot be read, is no JSON, or is no object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AuditDirError(f"{path} cannot be read: {reason_of(error)}.") from error
    except (ValueError, RecursionError) as error:
        raise AuditDirError(
            f"{path} is not valid JSON, so it is damaged.", hint="Record or replay again."
        ) from error
    if not isinstance(value, dict):
        raise AuditDirError(f"{path} holds no JSON object, so it is damaged.")
    return value


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """The object with a sha256 of itself, so that a later change of it is seen."""
    return {**value, _SEAL_KEY: _digest(value)}


def unsealed(path: Path, value: Mapping[str, Any]) -> dict[str, Any]:
    """What `sealed` was given.

    Raises:
        AuditDirError: The object is not the one that was sealed.
    """
    content = {key: item for key, item in value.items() if key != _SEAL_KEY}
    if value.get(_SEAL_KEY) != _digest(content):
        raise AuditDirError(
            f"{path} was changed after it was written.",
            hint="Restore it, or record or replay again.",
        )
    return content


def _digest(value: Mapping[str, Any]) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def sync(path: Path) -> None:
    """Flushes a file or a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file's bytes.

    Raises:
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_entry(path: Path) -> dict[str, object]:
    """Size and sha256 of a file, as manifests hold them."""
    return {"sha256": file_sha256(path), "size": path.stat().st_size}


def check_file(path: Path, entry: object) -> None:
    """Compares a file with its manifest entry.

    Raises:
        AuditDirError: It is missing, of another size, or has other bytes.
    """
    if not isinstance(entry, Mapping) or not {"size", "sha256"} <= entry.keys():
        raise AuditDirError(f"The manifest beside {path} does not list it, so it is damaged.")
    try:
        size = path.stat().st_size
        if size != entry["size"]:
            raise AuditDirError(
                f"{path} has {size} bytes, not the {entry['size']} that were written.",
                hint="The file is damaged or was changed; copy it again or redo the run.",
            )
        if file_sha256(path) != entry["sha256"]:
            raise AuditDirError(
                f"{path} does not have the sha256 that was written.",
                hint="The file is damaged or was changed; copy it again or redo the run.",
            )
    except OSError as error:
        raise AuditDirError(f"{path} cannot be read: {reason_of(error)}.") from error


def remove(path: Path) -> None:
    """Removes a file or a directory tree if it is there.

    Raises:
        RunFailedError: It could not be removed.
    """
    with writing(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def reason_of(error: OSError) -> str:
    """The system's reason, in lower case and without path or number."""
    reason = os.strerror(error.errno) if error.errno else str(error) or type(error).__name__
    return reason[:1].lower() + reason[1:]
