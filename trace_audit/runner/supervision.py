"""Waits for every rank of a run at once, and ends the run with the first that fails."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from trace_audit.jobs import Done, Event, Failed, Message
from trace_audit.runner.child import Emit
from trace_audit.runner.failures import Died, Ending, cause, is_decisive
from trace_audit.runner.processes import GRACE_SECONDS

LEADER = 0
CAUSE_SECONDS = 3.0  # between a rank's failure and naming the cause of it


class Listener(Protocol):
    """Something that ranks are heard through: the process of one, or a store for many."""

    @property
    def waitables(self) -> Sequence[Connection | int]:
        """What becomes ready when there is something to hear."""
        ...

    def hear(self, ready: Collection[object]) -> list[tuple[int, Event | Died]]:
        """Ranks and what they told, given those of the waitables that are ready."""
        ...


class Supervision:
    """One run of `world_size` ranks, from their start to its result.

    Attributes:
        endings: how ranks ended, in the order that was heard of.
    """

    def __init__(
        self,
        listeners: Sequence[Listener],
        on_event: Emit,
        *,
        world_size: int,
        timeout_seconds: int,
    ) -> None:
        self.endings: dict[int, Ending] = {}
        self._listeners = listeners
        self._on_event = on_event
        self._world_size = world_size
        self._timeout_seconds = timeout_seconds

    def result(self) -> dict[str, Any]:
        """Wait for rank 0's result.

        Raises:
            TraceAuditError: what ended the run before.
        """
        while LEADER not in self.endings and not self._failures():
            self._hear(None)
        if self._failures():
            self._hear_within(CAUSE_SECONDS, until_decided=True)
        done = self.endings.get(LEADER)
        if not isinstance(done, Done):
            raise cause(
                self.endings, world_size=self._world_size, timeout_seconds=self._timeout_seconds
            )
        self._let_the_others_end()
        return done.result

    def _failures(self) -> list[int]:
        return [rank for rank, ending in self.endings.items() if not isinstance(ending, Done)]

    def _let_the_others_end(self) -> None:
        """The result stands, whatever becomes of them; but not without a word."""
        self._hear_within(GRACE_SECONDS, until_decided=False)
        for rank in range(self._world_size):
            ending = self.endings.get(rank)
            if isinstance(ending, Failed):
                self._warn(rank, f"after the run was complete: {ending.error.message}")
            elif not isinstance(ending, Done):
                self._warn(rank, "it did not end by itself after the run was complete")

    def _warn(self, rank: int, text: str) -> None:
        self._on_event(Message(f"rank {rank} of {self._world_size}: {text}"))

    def _hear_within(self, seconds: float, *, until_decided: bool) -> None:
        deadline = time.monotonic() + seconds
        while len(self.endings) < self._world_size and (left := deadline - time.monotonic()) > 0:
            if until_decided and any(map(is_decisive, self.endings.values())):
                return
            self._hear(left)

    def _hear(self, timeout: float | None) -> None:
        waitables = [waitable for listener in self._listeners for waitable in listener.waitables]
        ready = frozenset(wait(waitables, timeout))
        for listener in self._listeners:
            for rank, heard in listener.hear(ready):
                self._take(rank, heard)

    def _take(self, rank: int, heard: Event | Died) -> None:
        if isinstance(heard, Done | Failed | Died):
            self.endings.setdefault(rank, heard)
        elif rank == LEADER:
            self._on_event(heard)
        elif isinstance(heard, Message):
            self._warn(rank, heard.text)
