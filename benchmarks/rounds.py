"""Sides that run in alternating rounds, and what is measured beside them in each."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from benchmarks.measure import Spread, Timing, progress
from benchmarks.transformers_side import NotRun


class Side(Protocol):
    """One way to decode the workload."""

    @property
    def name(self) -> str:
        """Of its row."""

    def run(self) -> Timing:
        """Decode every row once."""


@dataclass(kw_only=True)
class Entry:
    """A side and what became of it.

    Attributes:
        name: of its row.
        make: makes it and runs it once.
        is_own: whether it is this project's, whose errors end the benchmark.
        side: once it was made.
        timings: round -> what it took.
        not_run: why it was not, or no longer, run.
        error: the traceback of what it failed with, if it was an error.
    """

    name: str
    make: Callable[[], Side]
    is_own: bool
    side: Side | None = None
    timings: dict[int, Timing] = field(default_factory=dict)
    not_run: str | None = None
    error: str | None = None

    def start(self) -> None:
        """Make the side; see `attempt`."""
        progress(f"{self.name}: loading and warming up")
        start = time.perf_counter()

        def make() -> None:
            self.side = self.make()

        self.attempt(make)
        progress(f"{self.name}: {self.not_run or f'ready in {time.perf_counter() - start:.1f} s'}")

    def run(self, number: int) -> None:
        """Run it in one round, unless it failed before."""
        if self.not_run is not None:
            return

        def run() -> None:
            assert self.side is not None
            self.timings[number] = self.side.run()
            progress(f"round {number + 1}: {self.name} {self.timings[number].seconds:.2f} s")

        self.attempt(run)

    def attempt(self, action: Callable[[], None]) -> None:
        """Do it; where another's code fails, note why and go on without it."""
        try:
            action()
        except NotRun as reason:
            self.not_run = str(reason)
        except Exception as error:
            if self.is_own:
                raise
            first = next(iter(str(error).strip().splitlines()), "")
            self.not_run = f"{type(error).__name__}: {first}"
            self.error = traceback.format_exc()
            progress(self.error)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """What all rounds measured.

    Attributes:
        count: of rounds.
        entries: in the order of the table.
        beside: name -> a figure of each round that is no side's.
    """

    count: int
    entries: tuple[Entry, ...]
    beside: dict[str, list[float]]

    def entry(self, name: str) -> Entry | None:
        """The side of a name, if it was asked for."""
        return next((entry for entry in self.entries if entry.name == name), None)

    def over(self, figure: Callable[[int], float | None]) -> Spread | None:
        """A figure made round by round; None where no round has it."""
        values = [figure(number) for number in range(self.count)]
        there = [value for value in values if value is not None]
        return Spread.of(there) if there else None

    def seconds(self, name: str, number: int) -> float | None:
        """What a side took in a round."""
        entry = self.entry(name)
        timing = None if entry is None else entry.timings.get(number)
        return None if timing is None else timing.seconds

    def step(self, name: str, number: int) -> float | None:
        """What a decode step of a side took in a round, seconds."""
        entry = self.entry(name)
        timing = None if entry is None else entry.timings.get(number)
        return None if timing is None else timing.step_seconds


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """Their quotient, where there are both."""
    if numerator is None or denominator is None:
        return None
    return numerator / denominator


def run_rounds(
    entries: Sequence[Entry], beside: dict[str, Callable[[], float]], count: int
) -> Rounds:
    """Run every side once a round, every second round in the other order.

    Args:
        entries: already started.
        beside: what else to measure in each round.
        count: of rounds.
    """
    measured: dict[str, list[float]] = {name: [] for name in beside}
    for number in range(count):
        for name, measure in beside.items():
            measured[name].append(measure())
        for entry in entries if number % 2 == 0 else reversed(entries):
            entry.run(number)
    return Rounds(count=count, entries=tuple(entries), beside=measured)
