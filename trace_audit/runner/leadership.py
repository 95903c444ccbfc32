"""Rank 0's side of runs whose other ranks are served by commands of their own."""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from trace_audit.errors import ConfigError, RunFailedError, TraceAuditError
from trace_audit.jobs import Event, Failed, Job
from trace_audit.runner import child
from trace_audit.runner.channel import (
    LEADER,
    Call,
    Channel,
    End,
    Lost,
    Report,
    Verdict,
)
from trace_audit.runner.child import Emit, Lead, Target
from trace_audit.runner.failures import Died
from trace_audit.runner.place import Place
from trace_audit.runner.processes import running
from trace_audit.runner.supervision import Supervision

_FAREWELL_SECONDS = 2.0  # for the other ranks' commands to hear the end once they are there
_STARTING_SECONDS = 10.0  # for one to come that was not heard of yet
_CLOSE_SECONDS = 1.0


class Leadership:
    """Runs jobs with the ranks whose commands wait for them.

    Raises:
        ConfigError: the ranks cannot meet where MASTER_ADDR and MASTER_PORT say.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._channel = Channel(place)
        self._num_runs = 0
        self._wait_for_the_store()

    def run_job(
        self,
        job: Job,
        on_event: Emit,
        *,
        target: Target | None = None,
    ) -> dict[str, Any]:
        """As `trace_audit.runner.run_job`, with the other ranks' commands.

        Raises:
            ConfigError: the job's configuration is for another number of ranks.
            TraceAuditError: what the run raised, on whatever rank.
        """
        parallel = job.config.parallel
        self._place.check(parallel)
        call = Call(
            number=self._num_runs,
            world_size=self._place.world_size,
            device=job.config.engine.device,
            key=f"run-{uuid.uuid4().hex}",
            timeout_seconds=parallel.timeout_seconds,
        )
        self._num_runs += 1
        self._channel.send(call)
        is_complete = False
        try:
            rendezvous = self._place.rendezvous(call.key, call.timeout_seconds)
            task = Lead(job=job, rendezvous=rendezvous, target=target or child.execute_audit)
            result = self._supervise(task, call, on_event)
            is_complete = True
        finally:
            self._channel.send(Verdict(number=call.number, is_complete=is_complete))
        return result

    def end(self, exit_code: int, error: TraceAuditError | None) -> None:
        """Tell the other ranks that there are no more runs, and wait a moment for them to hear."""
        self._channel.send(End(exit_code=exit_code, error=error))
        if not self._place.has_store:
            # torchrun's store stays; this one goes with this process.
            self._wait_for_farewells()
        self._channel.close(_CLOSE_SECONDS)

    def _wait_for_farewells(self) -> None:
        others = frozenset(range(1, self._place.world_size))
        started = last_heard = time.monotonic()
        while missing := others - self._channel.departed:
            # One that came and is silent now is not going to speak; another may still be starting.
            until = last_heard + _FAREWELL_SECONDS
            if missing - self._channel.present:
                until = max(until, started + _STARTING_SECONDS)
            if (left := until - time.monotonic()) <= 0:
                return
            if self._channel.hear(wait(self._channel.waitables, left)):
                last_heard = time.monotonic()

    def _wait_for_the_store(self) -> None:
        wait(self._channel.waitables)
        for _, heard in self._channel.hear(self._channel.waitables):
            if isinstance(heard, Lost):
                raise ConfigError(
                    f"the ranks cannot meet at {self._place.address}: {heard.reason}",
                    hint="give every rank's command the same free MASTER_PORT of rank 0's machine",
                )

    def _supervise(self, task: Lead, call: Call, on_event: Emit) -> dict[str, Any]:
        with running([task]) as processes:
            return Supervision(
                [*processes, _Reports(self._channel, call.number)],
                on_event,
                world_size=call.world_size,
                timeout_seconds=call.timeout_seconds,
            ).result()


class _Reports:
    """Hears, through the channel, how one run ends for the other ranks."""

    def __init__(self, channel: Channel, number: int) -> None:
        self._channel = channel
        self._number = number

    @property
    def waitables(self) -> Sequence[Connection]:
        """The channel's."""
        return self._channel.waitables

    def hear(self, ready: Collection[object]) -> list[tuple[int, Event | Died]]:
        """Endings of this run; without a channel there is no run."""
        heard: list[tuple[int, Event | Died]] = []
        for rank, letter in self._channel.hear(ready):
            if isinstance(letter, Report) and letter.number == self._number:
                heard.append((rank, letter.ending))
            elif isinstance(letter, Lost):
                heard.append((LEADER, _without_channel(letter)))
        return heard


def _without_channel(lost: Lost) -> Failed:
    error = RunFailedError(f"the store of the ranks is gone: {lost.reason}")
    return Failed(error, "", "typed")
