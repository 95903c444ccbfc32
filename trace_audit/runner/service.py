"""Another rank's side of runs that rank 0's command leads."""

from __future__ import annotations

import signal
import time
from collections import deque
from multiprocessing.connection import wait

from trace_audit.errors import ConfigError, RunFailedError
from trace_audit.jobs import Done, Message, Stage
from trace_audit.runner import child
from trace_audit.runner.channel import (
    JOIN_SECONDS,
    Alive,
    Call,
    Channel,
    End,
    Letter,
    Lost,
    Met,
    Report,
    Verdict,
)
from trace_audit.runner.child import Emit, Serve, ServerTarget
from trace_audit.runner.failures import cause, failure_of, is_consequence
from trace_audit.runner.place import Place
from trace_audit.runner.processes import RankProcess, running

_CLOSE_SECONDS = 1.0
_LEAST_PATIENCE_SECONDS = 10.0
_HINT = "start one command a RANK, all with the MASTER_ADDR and MASTER_PORT of rank 0's"


class Service:
    """Serves in rank 0's runs, one after the other, each in a process of its own."""

    def __init__(self, place: Place, on_event: Emit, server: ServerTarget | None = None) -> None:
        self._place = place
        self._on_event = on_event
        self._server = server or child.serve_audit
        self._channel = Channel(place)
        self._heard: deque[Letter | Lost] = deque()  # in order: what came before a loss counts
        self._has_met = False
        self._last_heard = time.monotonic()
        # The channel gives up first, and says why, where rank 0's command never appears.
        self._patience = 2.0 * JOIN_SECONDS

    def run(self) -> int:
        """Serve until rank 0 has no more runs.

        Returns:
            The exit code of rank 0's command.

        Raises:
            TraceAuditError: what ended rank 0's command; or this rank cannot do its part; or rank 0
                is gone.
        """
        self._on_event(Stage(f"waiting for rank 0 at {self._place.address}"))
        try:
            while True:
                letter = self._next_letter()
                if isinstance(letter, End):
                    return self._end(letter)
                assert isinstance(letter, Call)
                self._serve(letter)
        finally:
            self._channel.close(_CLOSE_SECONDS)

    def _end(self, end: End) -> int:
        if end.error is not None:
            raise end.error
        return end.exit_code

    def _serve(self, call: Call) -> None:
        self._patience = max(call.timeout_seconds, _LEAST_PATIENCE_SECONDS)
        self._on_event(Stage(f"serving in run {call.number + 1}"))
        rendezvous = self._place.rendezvous(call.key, call.timeout_seconds)
        task = Serve(device=call.device, rendezvous=rendezvous, target=self._server)
        try:
            self._check(call)
            with running([task]) as (process,):
                verdict = self._verdict(process, call)
                if not verdict.is_complete and process.ending is None:
                    process.signal(signal.SIGTERM)
        except BaseException as error:
            self._report_that_it_ended(call, error)
            raise

    def _check(self, call: Call) -> None:
        if call.world_size != self._place.world_size:
            raise ConfigError(
                f"WORLD_SIZE is {self._place.world_size} here and {call.world_size} for rank 0",
                hint="give every rank's command the same WORLD_SIZE",
            )

    def _report_that_it_ended(self, call: Call, error: BaseException) -> None:
        """Let rank 0 know at once; where this rank has reported before, that counts."""
        if not isinstance(error, Exception):
            error = RunFailedError("its command was ended")
        self._channel.send(Report(number=call.number, ending=failure_of(error)))

    def _verdict(self, process: RankProcess, call: Call) -> Verdict:
        """Wait for this rank's process and rank 0's word, whichever comes first."""
        try:
            verdict = self._next_letter(process, call)
        except RunFailedError:
            ending = process.ending
            if ending is None or isinstance(ending, Done) or is_consequence(ending):
                raise
            # Rank 0 went away without a word because of this one.
            raise cause(
                {self._place.rank: ending},
                world_size=self._place.world_size,
                timeout_seconds=call.timeout_seconds,
            ) from None
        assert isinstance(verdict, Verdict)
        return verdict

    def _next_letter(self, process: RankProcess | None = None, call: Call | None = None) -> Letter:
        """Wait for rank 0's next word, and listen to this rank's process meanwhile.

        Raises:
            RunFailedError: rank 0's command is gone, was never there, or says nothing for too long.
        """
        while not self._heard:
            self._listen(process, call)
        heard = self._heard.popleft()
        if not isinstance(heard, Lost):
            return heard
        rank_0 = f"rank 0 of {self._place.world_size}"
        if self._has_met:
            raise RunFailedError(f"{rank_0} is gone: {heard.reason}")
        raise RunFailedError(f"{rank_0} was not met: {heard.reason}", hint=_HINT)

    def _listen(self, process: RankProcess | None, call: Call | None) -> None:
        left = self._last_heard + self._patience - time.monotonic()
        of_process = [] if process is None else process.waitables
        ready = frozenset(wait([*of_process, *self._channel.waitables], max(left, 0.0)))
        if process is not None and call is not None:
            self._hear_process(process, call, ready)
        heard = self._channel.hear(ready)
        if not heard and left <= 0:
            raise RunFailedError(
                f"rank 0 of {self._place.world_size} did not answer for {self._patience:.0f} s"
            )
        for _, each in heard:
            if not isinstance(each, Lost):
                self._has_met, self._last_heard = True, time.monotonic()
            if not isinstance(each, Met | Alive):
                self._heard.append(each)

    def _hear_process(self, process: RankProcess, call: Call, ready: frozenset[object]) -> None:
        for _, event in process.hear(ready):
            if process.ending is not None:
                self._channel.send(Report(number=call.number, ending=process.ending))
            elif isinstance(event, Message):
                self._on_event(event)
