"""Processes of ranks: started, listened to, ended and reaped, with all that they started."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from trace_audit.jobs import Done, Event, Failed
from trace_audit.runner.child import Task, child_main
from trace_audit.runner.failures import Died, Ending

GRACE_SECONDS = 3.0  # between asking processes to end and ending them


class RankProcess:
    """The process of one rank, which leads a process group of its own.

    Attributes:
        rank: of the run; 0 where there is one process.
        ending: how it ended, None as long as nothing was heard of that.
    """

    def __init__(self, task: Task) -> None:
        context = multiprocessing.get_context("spawn")
        self.rank = 0 if task.rendezvous is None else task.rendezvous.rank
        self.ending: Ending | None = None
        self._receiver, self._sender = context.Pipe(duplex=False)
        self._process: SpawnProcess = context.Process(
            target=child_main, args=(task, self._sender), name=f"trace-audit-rank-{self.rank}"
        )

    def start(self) -> None:
        """Start it."""
        # A terminal's Ctrl-C reaches the child too until it has left this group; it would print a
        # traceback of its own. Blocked signals stay blocked in the child, and wait for us here.
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        # The child's copy is then the only one, and reading ends when the child does.
        self._sender.close()

    @property
    def waitables(self) -> list[Connection | int]:
        """What becomes ready when there is something to hear; empty once it has ended."""
        return [] if self.ending is not None else [self._receiver, self._process.sentinel]

    @property
    def sentinel(self) -> int:
        """What becomes ready when the process has ended."""
        return self._process.sentinel

    @property
    def was_started(self) -> bool:
        """Whether there is a process at all."""
        return self._process.pid is not None

    def hear(self, ready: Collection[object]) -> list[tuple[int, Event | Died]]:
        """The rank and what it told next, if it told anything; a death where it ended silently.

        Args:
            ready: of many processes' `waitables`, those that are ready.
        """
        if not any(waitable in ready for waitable in self.waitables):
            return []
        heard = self._receive()
        if isinstance(heard, Done | Failed | Died):
            self.ending = heard
        return [(self.rank, heard)]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and what it started."""
        if self._process.pid is None:
            return
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):
            # No group yet: it was signalled before it made one. macOS says EPERM of zombies.
            if self._process.is_alive():
                os.kill(self._process.pid, number)

    def join(self) -> None:
        """Reap it, and close this side of its pipe."""
        if self.was_started:
            self._process.join()
        self._sender.close()
        self._receiver.close()

    def _receive(self) -> Event | Died:
        try:
            # Without a word left in it, the pipe of an ended process is not waited for: something
            # that the process started may hold it open.
            if self._receiver.poll() or self._process.is_alive():
                event: Event = self._receiver.recv()
                return event
        except (EOFError, OSError):
            # OSError: it died within a message.
            pass
        # It closed its pipe; what it ended with is known a moment later.
        self._process.join(GRACE_SECONDS)
        return Died(self._process.exitcode)


@contextmanager
def running(tasks: Sequence[Task]) -> Iterator[list[RankProcess]]:
    """Start a process a task, and leave none of them behind.

    Yields:
        The processes, in the order of the tasks. Those that have not ended when the block does are
        given `GRACE_SECONDS` to do so, and asked to if it raised.
    """
    processes: list[RankProcess] = []
    try:
        for task in tasks:
            processes.append(RankProcess(task))
            processes[-1].start()
        yield processes
    except BaseException:
        # A failure, an interrupt, a reader of events that failed: the run is not wanted any more.
        for process in processes:
            if process.ending is None:
                process.signal(signal.SIGTERM)
        raise
    finally:
        _reap(processes)


def _reap(processes: Sequence[RankProcess]) -> None:
    """Wait for all of them in bounded time, and leave nothing of their groups."""
    deadline = time.monotonic() + GRACE_SECONDS
    waiting = {process.sentinel for process in processes if process.was_started}
    while waiting and (left := deadline - time.monotonic()) > 0:
        waiting.difference_update(wait(list(waiting), timeout=left))
    for process in processes:
        # Before it is reaped its id cannot belong to anyone else.
        process.signal(signal.SIGKILL)
        process.join()
