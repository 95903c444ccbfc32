"""Ranks that live in one process and take turns.

Every rank is a thread with a model shard and an engine of its own, and exactly one of them runs at
a time: it computes until it needs something from another rank, then hands its turn on. So the ranks
of any tensor-parallel size run the very code that separate processes run, on one device.
"""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trace_audit.errors import RunFailedError
from trace_audit.parallel.reduction import Reduction, reduce_partials


class _Abandoned(BaseException):
    """Ends a rank's thread after another rank failed."""


class _Box:
    """What the ranks of a group give to one operation."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.num_given = 0
        self.num_taken = 0
        self.is_combined = False
        self.result: Any = None


class Lockstep:
    """Takes turns between `size` ranks; rank 0 is the thread that made this object.

    Use as a context manager: leaving it waits for the other ranks to end, or ends them if there
    was an error.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.boxes: dict[tuple[object, ...], _Box] = {}
        self.mail: dict[tuple[int, int], deque[torch.Tensor]] = {}
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._threads: list[threading.Thread] = []
        self._live = [True] + [False] * (size - 1)
        self._error: BaseException | None = None
        self._abandoned = False
        self._num_stalled = 0

    def __enter__(self) -> Lockstep:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.wait(0, lambda: not any(self._live[1:]))
        self._abandoned = True
        for turn in self._turns[1:]:
            turn.release()
        for thread in self._threads:
            thread.join()

    def start(self, function: Callable[[int], None]) -> None:
        """Start every other rank; each calls `function(rank)` when its turn comes."""
        for rank in range(1, self.size):
            self._live[rank] = True
            thread = threading.Thread(
                target=self._run, args=(rank, function), name=f"rank-{rank}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def progressed(self) -> None:
        """Note that a rank gave something that another may be waiting for."""
        self._num_stalled = 0

    def wait(self, rank: int, ready: Callable[[], bool]) -> None:
        """Let the other ranks run until `ready()`.

        Raises:
            RunFailedError: all of them wait for each other.
            Exception: what another rank raised, on rank 0.
        """
        while not ready():
            self._num_stalled += 1
            if self._num_stalled > 2 * self.size:
                raise RunFailedError(
                    "the emulated ranks wait for each other",
                    hint="this is a bug: please report it with the configuration",
                )
            self._hand_on(rank)
            self._turns[rank].acquire()
            if self._abandoned:
                raise _Abandoned
            if rank == 0 and self._error is not None:
                raise self._error

    def _hand_on(self, rank: int) -> None:
        for step in range(1, self.size + 1):
            following = (rank + step) % self.size
            if self._live[following]:
                self._turns[following].release()
                return

    def _run(self, rank: int, function: Callable[[int], None]) -> None:
        self._turns[rank].acquire()
        try:
            if not self._abandoned:
                # The number of threads is a setting of the calling thread in OpenMP.
                torch.set_num_threads(torch.get_num_threads())
                function(rank)
        except _Abandoned:
            pass
        except BaseException as error:
            self._error = self._error or error
        finally:
            self._live[rank] = False
            self.progressed()
            if self._error is not None:
                self._turns[0].release()
            elif not self._abandoned:
                self._hand_on(rank)


class LockstepCommunicator:
    """A group of ranks that take turns.

    Args:
        lockstep: shared by all ranks.
        name: tells this group from others of the same ranks.
        ranks: the group's ranks in the world, ascending.
        world_rank: this rank's own.
    """

    def __init__(
        self, lockstep: Lockstep, name: str, ranks: Sequence[int], world_rank: int
    ) -> None:
        self._lockstep = lockstep
        self._name = name
        self._ranks = tuple(ranks)
        self._world_rank = world_rank
        self._num_operations = 0
        self.rank = self._ranks.index(world_rank)
        self.size = len(self._ranks)

    def all_reduce(self, partial: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        """See `Communicator.all_reduce`."""
        assert reduction.order != "native"
        order, float32 = reduction.order, reduction.float32
        total: torch.Tensor = self._exchange(
            partial, lambda partials: reduce_partials(partials, order, float32=float32)
        )
        return total.clone()

    def all_gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """See `Communicator.all_gather`."""
        parts: list[torch.Tensor] = self._exchange(part, lambda parts: parts)
        return [part.clone() for part in parts]

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """See `Communicator.broadcast`."""
        given: torch.Tensor = self._exchange(tensor, lambda tensors: tensors[source])
        return given.clone()

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """See `Communicator.send`."""
        self._mail(self._world_rank, self._ranks[to]).append(tensor.clone())
        self._lockstep.progressed()

    def receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        """See `Communicator.receive`."""
        box = self._mail(self._ranks[source], self._world_rank)
        self._lockstep.wait(self._world_rank, lambda: bool(box))
        return box.popleft()

    def gather_objects(self, value: Any) -> list[Any]:
        """See `Communicator.gather_objects`."""
        values: list[Any] = pickle.loads(self._exchange(value, pickle.dumps))
        return values

    def broadcast_object(self, value: Any, source: int) -> Any:
        """See `Communicator.broadcast_object`."""
        return pickle.loads(self._exchange(value, lambda values: pickle.dumps(values[source])))

    def _mail(self, source: int, to: int) -> deque[torch.Tensor]:
        return self._lockstep.mail.setdefault((source, to), deque())

    def _exchange(self, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """What `combine` makes of every rank's value, computed once."""
        key = (self._name, self._ranks, self._num_operations)
        self._num_operations += 1
        box = self._lockstep.boxes.setdefault(key, _Box(self.size))
        box.values[self.rank] = value
        box.num_given += 1
        self._lockstep.progressed()
        self._lockstep.wait(self._world_rank, lambda: box.num_given == self.size)
        if not box.is_combined:
            box.result, box.is_combined = combine(box.values), True
        box.num_taken += 1
        if box.num_taken == self.size:
            del self._lockstep.boxes[key]
        return box.result
