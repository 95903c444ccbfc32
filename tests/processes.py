"""Waiting for processes that are not ours to reap."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable


def wait_until_dead(pids: Iterable[int], *, seconds: float) -> bool:
    """Whether every process ends in time; a zombie has ended."""
    return all(_ends(pid, seconds) for pid in pids)


def _ends(pid: int, seconds: float) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        readable, _, _ = select.select([descriptor], [], [], seconds)
        return bool(readable)
    finally:
        os.close(descriptor)
