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


class Service:
    """Serves in rank 0's runs, one after the other, each in a process of its own."""

    def __init__(self, place: Place, on_event: Emit, server: ServerTarget | None = None) -> None:
        self._place = place
        self._on_event = on_event
        self._server = server or child.serve_audit
        self._channel = Channel(place)
        self._letters: deque[Letter] = deque()
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
        while not self._letters:
            try:
                self._listen(process, call)
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
        verdict = self._letters.popleft()
        assert isinstance(verdict, Verdict)
        return verdict

    def _next_letter(self) -> Letter:
        while not self._letters:
            self._listen(None, None)
        return self._letters.popleft()

    def _listen(self, process: RankProcess | None, call: Call | None) -> None:
        """Wait until there is something to hear, and take it.

        Raises:
            RunFailedError: rank 0's command is gone, or has said nothing for too long.
        """
        left = self._last_heard + self._patience - time.monotonic()
        if left <= 0:
            raise RunFailedError(
                f"rank 0 of {self._place.world_size} did not answer for {self._patience:.0f} s"
            )
        of_process = [] if process is None else process.waitables
        ready = frozenset(wait([*of_process, *self._channel.waitables], left))
        if process is not None and call is not None:
            self._hear_process(process, call, ready)
        for _, heard in self._channel.hear(ready):
            if isinstance(heard, Lost):
                raise RunFailedError(f"rank 0 of {self._place.world_size} is gone: {heard.reason}")
            self._last_heard = time.monotonic()
            if not isinstance(heard, Met | Alive):
                self._letters.append(heard)

    def _hear_process(self, process: RankProcess, call: Call, ready: frozenset[object]) -> None:
        for _, event in process.hear(ready):
            if process.ending is not None:
                self._channel.send(Report(number=call.number, ending=process.ending))
            elif isinstance(event, Message):
                self._on_event(event)
