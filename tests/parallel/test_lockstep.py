"""Ranks that take turns: what they exchange, and how they end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from trace_audit.errors import ModelError, RunFailedError
from trace_audit.parallel.lockstep import Lockstep, LockstepCommunicator
from trace_audit.parallel.reduction import Reduction


def together(size: int, function: Callable[[LockstepCommunicator], Any]) -> list[Any]:
    """What the function returns on every rank."""
    found: list[Any] = [None] * size
    with Lockstep(size) as lockstep:

        def run(rank: int) -> None:
            found[rank] = function(LockstepCommunicator(lockstep, "all", range(size), rank))

        lockstep.start(run)
        run(0)
    return found


def no_rank_is_left() -> bool:
    return not [t for t in threading.enumerate() if t.name.startswith("rank-")]


def test_all_reduce_gives_every_rank_the_sum_to_keep():
    def run(group: LockstepCommunicator) -> list[float]:
        total = group.all_reduce(
            torch.full((2,), float(group.rank + 1)), Reduction(order="rank_order")
        )
        total *= 10**group.rank  # what one rank does to it, the others do not see
        return total.tolist()

    assert together(3, run) == [[6, 6], [60, 60], [600, 600]]


def test_all_gather_and_broadcast_keep_rank_order():
    def run(group: LockstepCommunicator) -> tuple[list[float], float]:
        parts = group.all_gather(torch.tensor([float(group.rank)]))
        last = group.broadcast(torch.tensor([float(group.rank)]), group.size - 1)
        return [float(p) for p in parts], float(last)

    assert together(3, run) == [([0, 1, 2], 2)] * 3


def test_sent_tensors_arrive_in_order_and_as_copies():
    def run(group: LockstepCommunicator) -> list[float] | None:
        if group.rank == 0:
            tensor = torch.zeros(1)
            for value in (1.0, 2.0):
                tensor.fill_(value)
                group.send(tensor, 2)
            return None
        if group.rank == 2:
            return [float(group.receive(torch.zeros(1), 0)) for _ in range(2)]
        return None

    assert together(3, run)[2] == [1, 2]


def test_objects_are_copies():
    shared = {"list": [1]}

    def run(group: LockstepCommunicator) -> Any:
        got = group.broadcast_object(shared if group.rank == 1 else None, 1)
        got["list"].append(group.rank)
        return got, group.gather_objects(group.rank)

    assert [r[0] for r in together(2, run)] == [{"list": [1, 0]}, {"list": [1, 1]}]
    assert shared == {"list": [1]}


def test_two_groups_of_the_same_ranks_do_not_mix():
    with Lockstep(2) as lockstep:
        found = {}

        def run(rank: int) -> None:
            a, b = (LockstepCommunicator(lockstep, name, range(2), rank) for name in "ab")
            first = a.gather_objects(("a", rank))
            found[rank] = (first, b.gather_objects(("b", rank)))

        lockstep.start(run)
        run(0)
    assert found[0] == found[1] == ([("a", 0), ("a", 1)], [("b", 0), ("b", 1)])


def test_one_rank_runs_at_a_time():
    running = []

    def run(group: LockstepCommunicator) -> None:
        for _ in range(5):
            running.append(group.rank)
            assert len(running) == 1
            torch.randn(200, 200) @ torch.randn(200, 200)
            running.remove(group.rank)
            group.gather_objects(None)

    together(4, run)


def test_an_error_of_another_rank_is_raised_on_rank_0_and_ends_the_rest():
    def run(group: LockstepCommunicator) -> None:
        group.gather_objects(None)
        if group.rank == 2:
            raise ModelError("no such layer")
        group.gather_objects(None)

    with pytest.raises(ModelError, match="no such layer"):
        together(4, run)
    assert no_rank_is_left()


def test_an_error_of_rank_0_ends_the_others():
    ended = []

    def run(group: LockstepCommunicator) -> None:
        try:
            group.gather_objects(None)
            if group.rank == 0:
                raise ModelError("no such file")
            group.gather_objects(None)
        finally:
            ended.append(group.rank)

    with pytest.raises(ModelError, match="no such file"):
        together(3, run)
    assert sorted(ended) == [0, 1, 2]
    assert no_rank_is_left()


def test_an_error_before_the_others_began():
    def start_and_fail() -> None:
        with Lockstep(3) as lockstep:
            lockstep.start(lambda rank: None)
            raise ModelError("early")

    with pytest.raises(ModelError):
        start_and_fail()
    assert no_rank_is_left()


def test_ranks_that_wait_for_each_other_are_told_so():
    def run(group: LockstepCommunicator) -> None:
        group.receive(torch.zeros(1), 1 - group.rank)

    with pytest.raises(RunFailedError, match="wait for each other"):
        together(2, run)
    assert no_rank_is_left()


def test_leaving_waits_for_ranks_that_have_more_to_do():
    done = []

    def run(group: LockstepCommunicator) -> None:
        group.gather_objects(None)
        if group.rank:
            done.append(group.rank)

    together(3, run)
    assert sorted(done) == [1, 2]
