"""Replaces parts of a directory so that an interruption leaves the old ones or the new ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trace_audit.errors import RunFailedError
from trace_audit.storage.files import remove, sync, writing


def swap_in(new: Path, target: Path, replaced: Path, *, parts: Sequence[str], marker: str) -> None:
    """Moves parts from `new` into `target`, those that were there into `replaced`.

    The marker is what makes `target` complete: it goes first and comes last, so that a reader
    never sees old and new parts together. Nothing is deleted.

    Args:
        new: Holds the complete new parts, on the same file system.
        target: Gets them.
        replaced: Gets the old ones; must not exist or hold nothing of use.
        parts: Names without the marker.
        marker: Name of the part that completes.

    Raises:
        RunFailedError: The disk refused; the old parts are back. After a kill, :func:`roll_back`
            restores them.
    """
    remove(replaced)
    try:
        _swap(new, target, replaced, parts, marker)
    except RunFailedError:
        roll_back(target, replaced, parts=parts, marker=marker)
        raise


def roll_back(target: Path, replaced: Path, *, parts: Sequence[str], marker: str) -> None:
    """Restores the old parts if a swap was interrupted; otherwise does nothing.

    Args:
        target: As of the swap.
        replaced: As of the swap.
        parts: As of the swap.
        marker: As of the swap.

    Raises:
        RunFailedError: The disk refused.
    """
    if (target / marker).exists() or not (replaced / marker).exists():
        return
    for name in (*parts, marker):
        if (replaced / name).exists():
            remove(target / name)
            with writing(target):
                (replaced / name).rename(target / name)
    with writing(target):
        sync(target)


def _swap(new: Path, target: Path, replaced: Path, parts: Sequence[str], marker: str) -> None:
    with writing(target):
        replaced.mkdir()
        sync(new)
        for name in (marker, *parts):
            if (target / name).exists():
                (target / name).rename(replaced / name)
        for name in parts:
            if (new / name).exists():
                (new / name).rename(target / name)
        sync(replaced)
        sync(target)
        (new / marker).rename(target / marker)
        sync(target)
