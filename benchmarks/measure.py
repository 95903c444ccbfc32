"""Time: what a run took, when its steps ended, and how a figure spreads over rounds."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

_READ_BYTES = 16 * 1024**2


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A figure over rounds.

    Attributes:
        median, low, high: of the values.
        by_round: the values.
    """

    median: float
    low: float
    high: float
    by_round: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """At least one value."""
        return cls(
            median=statistics.median(values),
            low=min(values),
            high=max(values),
            by_round=tuple(values),
        )

    def text(self, digits: int) -> str:
        """The median and what it lies between."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}..{self.high:.{digits}f})"

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What one run took.

    Attributes:
        seconds: from the prompts to the last token on the host.
        step_seconds: of a decode step while every row decodes; None where the batch was never full
            for two steps.
    """

    seconds: float
    step_seconds: float | None


class Stamps:
    """Moments of a device: events in its stream on CUDA, the clock's time elsewhere.

    A host that runs ahead of the device would read its own clock too early.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Note this moment."""
        if not self._is_cuda:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """Every mark's distance from the first."""
        if not self._is_cuda:
            return [mark - self._marks[0] for mark in self._marks]
        torch.cuda.synchronize()
        return [self._marks[0].elapsed_time(mark) / 1000 for mark in self._marks]


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def step_seconds(marks: Sequence[float], committed: Sequence[int], rows: int) -> float | None:
    """Time of a step between the first and the last one that committed a token in every row.

    Args:
        marks: when each step ended, seconds.
        committed: tokens each of them committed.
        rows: of a full batch.
    """
    full = [i for i, count in enumerate(committed) if count == rows]
    if len(full) < 2:
        return None
    first, last = full[0], full[-1]
    return (marks[last] - marks[first]) / (last - first)


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call, with all that it started on the device."""
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second of a large copy on the device, those read and those written."""
    # Far beyond any cache, and long enough to be timed.
    num_bytes, repeats = (2 * 1024**3, 10) if device.type == "cuda" else (128 * 1024**2, 3)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copies() -> None:
        for _ in range(repeats):
            target.copy_(source)

    target.copy_(source)
    return 2 * num_bytes * repeats / timed(copies, device)


def plain_read(paths: Sequence[Path]) -> float:
    """Bytes a second of reading files from the first byte to the last, not from the page cache."""
    drop_from_cache(paths)
    start = time.perf_counter()
    num_bytes = 0
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(_READ_BYTES):
                num_bytes += len(chunk)
    return num_bytes / (time.perf_counter() - start)


def drop_from_cache(paths: Sequence[Path]) -> None:
    """Ask the system to forget the files' pages, as far as it lets a process ask."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def progress(text: str) -> None:
    """Tell what goes on, beside the table."""
    print(text, file=sys.stderr, flush=True)
