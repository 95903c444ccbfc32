"""Messages between the commands of joined ranks, through the store that torchrun or rank 0 serves.

A store's calls block for as long as the other side likes, and meanwhile no signal is handled. So
they are a thread's: the command itself waits for a pipe, beside those of its processes.
"""

from __future__ import annotations

import base64
import multiprocessing
import pickle
import socket
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

from trace_audit.errors import TraceAuditError
from trace_audit.runner.failures import Ending
from trace_audit.runner.place import Place

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

LEADER = 0
JOIN_SECONDS = 300  # for rank 0's command to appear; a run's own timeout is not known yet
_POLL_SECONDS = 0.1
_ALIVE_SECONDS = 1.0
_STORE_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True, kw_only=True)
class Call:
    """Rank 0 begins a run, and the others are to serve in it."""

    number: int
    world_size: int
    device: str
    key: str
    timeout_seconds: int


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Rank 0 says that a run is over, and whether that was its result."""

    number: int
    is_complete: bool


@dataclass(frozen=True, kw_only=True)
class End:
    """Rank 0 has no more runs; its command ends with this code, and this error if it has one."""

    exit_code: int
    error: TraceAuditError | None


@dataclass(frozen=True, kw_only=True)
class Report:
    """Another rank says how a run ended for it."""

    number: int
    ending: Ending


@dataclass(frozen=True)
class Greeting:
    """Another rank's command is there."""


@dataclass(frozen=True)
class Farewell:
    """Another rank's command has heard the end, or has ended before."""


@dataclass(frozen=True)
class Met:
    """The store is there."""


@dataclass(frozen=True)
class Alive:
    """Rank 0's command is there."""


@dataclass(frozen=True)
class Lost:
    """The store is gone, or was never there."""

    reason: str


Letter: TypeAlias = Call | Verdict | End | Report | Greeting | Farewell
Heard: TypeAlias = Letter | Met | Alive | Lost


class Channel:
    """One command's side: letters from it, and to it from the ranks it listens to.

    Attributes:
        present: the other ranks whose commands have come.
        departed: those that have ended, or are about to.
    """

    def __init__(self, place: Place) -> None:
        self.present: set[int] = set()
        self.departed: set[int] = set()
        self._place = place
        self._outgoing: SimpleQueue[Letter | None] = SimpleQueue()
        self._receiver, self._sender = multiprocessing.Pipe(duplex=False)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    @property
    def waitables(self) -> Sequence[Connection]:
        """What becomes ready when there is something to hear."""
        return [self._receiver]

    def hear(self, ready: Collection[object]) -> list[tuple[int, Heard]]:
        """What came, each with the rank that it came from.

        Args:
            ready: of many waitables, those that are ready.
        """
        if self._receiver not in ready:
            return []
        heard: list[tuple[int, Heard]] = []
        while self._receiver.poll():
            heard.append(self._receiver.recv())
        self.present.update(rank for rank, letter in heard if isinstance(letter, Greeting))
        self.departed.update(rank for rank, letter in heard if isinstance(letter, Farewell))
        return heard

    def send(self, letter: Letter) -> None:
        """Send to rank 0, or from it to every other rank. Returns at once."""
        self._outgoing.put(letter)

    def close(self, seconds: float) -> None:
        """Send what is to be sent, if that takes no longer than this."""
        self._closing.set()
        self._outgoing.put(None)
        self._thread.join(seconds)

    def _carry(self) -> None:
        try:
            post = self._host() if self._place.rank == LEADER else self._join()
            self._exchange(post)
        except Exception as error:
            # Whoever waits for the pipe decides what it means.
            lines = str(error).strip().splitlines() or [type(error).__name__]
            self._sender.send((LEADER, Lost(lines[0])))

    def _host(self) -> _Post:
        """Rank 0's command, for the others to join."""
        from trace_audit.parallel.rendezvous import host_store, join_store

        place = self._place
        if place.has_store:
            post = _Post(join_store(place.address, _STORE_TIMEOUT), place)
        else:
            post = _Post(host_store(place.port, _STORE_TIMEOUT), place)
        self._sender.send((LEADER, Met()))
        return post

    def _join(self) -> _Post:
        """Rank 0's command, once something was heard of it.

        One that goes away before that had ended; this command waits for the next.
        """
        from torch.distributed import DistError

        place = self._place
        deadline = time.monotonic() + JOIN_SECONDS
        post = None
        while True:
            reason = f"nothing of it was heard at {place.address} for {JOIN_SECONDS} s"
            try:
                post = post or self._enter()
                if post is None:
                    reason = f"another {place.name} has joined the command at {place.address}"
                elif self._receive(post):
                    return post
            except (OSError, DistError):
                if place.has_store:
                    raise
                post = None
            if self._closing.wait(_POLL_SECONDS) or time.monotonic() > deadline:
                raise TimeoutError(reason)

    def _enter(self) -> _Post | None:
        """The store that is there now; None if another command of this rank was there before.

        That was this rank's last one, whose rank 0 has yet to end, or one with the same RANK.
        """
        from trace_audit.parallel.rendezvous import join_store

        place = self._place
        if not place.has_store:
            # torch would say on standard error how often it tried.
            socket.create_connection((place.host, place.port), timeout=1).close()
        post = _Post(join_store(place.address, _STORE_TIMEOUT), place)
        if post.number > 1 and not place.has_store:
            return None
        post.send(Greeting())
        return post

    def _exchange(self, post: _Post) -> None:
        """Carry letters both ways until closed, or until rank 0's command is over."""
        while not post.is_over and self._send_outgoing(post):
            self._receive(post)
        if self._place.rank != LEADER:
            # At once, however busy this command is: rank 0 waits to take the store away.
            post.send(Farewell())

    def _receive(self, post: _Post) -> bool:
        """Pass on what came; whether anything did."""
        heard = post.receive()
        for each in heard:
            self._sender.send(each)
        return bool(heard)

    def _send_outgoing(self, post: _Post) -> bool:
        """Send what was given to send, and wait a moment for it; False once closed."""
        with suppress(Empty):
            letter = self._outgoing.get(timeout=_POLL_SECONDS)
            while letter is not None:
                post.send(letter)
                letter = self._outgoing.get_nowait()
            return False
        return True


class _Post:
    """Letters as keys of a store, numbered by sender.

    Attributes:
        number: how many commands of this rank have used the store so far, this one included; the
            commands of one number belong together.
        is_over: rank 0 has said that its command ends.
    """

    def __init__(self, store: Store, place: Place) -> None:
        from trace_audit.parallel.rendezvous import under

        mine = under(store, f"trace-audit/attempt-{place.attempt}")
        self.number = mine.add(f"commands/{place.rank}", 1)
        self.is_over = False
        self._store = under(mine, f"command-{self.number}")
        self._place = place
        self._num_sent = 0
        others = range(1, place.world_size) if place.rank == LEADER else [LEADER]
        self._num_received = dict.fromkeys(others, 0)
        self._pulse = 0
        self._next_pulse = 0.0

    def send(self, letter: Letter) -> None:
        text = base64.b64encode(pickle.dumps(letter)).decode()
        self._store.set(f"{self._place.rank}/{self._num_sent}", text)
        self._num_sent += 1

    def receive(self) -> list[tuple[int, Heard]]:
        heard: list[tuple[int, Heard]] = [(LEADER, Alive())] if self._feel_pulse() else []
        for rank in self._num_received:
            # After rank 0's last word its store may go at any time.
            while not self.is_over and self._store.check(
                [key := f"{rank}/{self._num_received[rank]}"]
            ):
                letter = pickle.loads(base64.b64decode(self._store.get(key)))
                heard.append((rank, letter))
                self._num_received[rank] += 1
                self.is_over = isinstance(letter, End)
        return heard

    def _feel_pulse(self) -> bool:
        """Show that this is rank 0's command, or whether that has done so since last asked."""
        if self._place.rank == LEADER:
            if time.monotonic() >= self._next_pulse:
                self._next_pulse = time.monotonic() + _ALIVE_SECONDS
                self._store.add("pulse", 1)
            return False
        before, self._pulse = self._pulse, self._store.add("pulse", 0)
        return self._pulse != before
