"""How commands of joined ranks meet and part: each command of a rank with one of rank 0."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace

import pytest

from tests.cli.test_ranks import free_port
from trace_audit.errors import ConfigError, RunFailedError
from trace_audit.jobs import Event
from trace_audit.parallel.rendezvous import host_store, join_store, under
from trace_audit.runner import channel, leadership, service
from trace_audit.runner.channel import End, Farewell, Greeting
from trace_audit.runner.leadership import Leadership
from trace_audit.runner.place import Place
from trace_audit.runner.service import Service

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="as the tests of the whole command")

SECONDS = 60  # generous: nothing waits for so long unless it is stuck
LONG = timedelta(seconds=SECONDS)


@pytest.fixture
def threads() -> ThreadPoolExecutor:
    """Commands that run beside the test."""
    return ThreadPoolExecutor(max_workers=8)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time of both sides; `ahead` can be raised instead of waiting."""
    clock = SimpleNamespace(ahead=0.0)
    clock.monotonic = lambda: time.monotonic() + clock.ahead
    monkeypatch.setattr(leadership, "time", clock)
    monkeypatch.setattr(service, "time", clock)
    return clock


def places(world_size: int = 2) -> list[Place]:
    first = Place(
        rank=0,
        world_size=world_size,
        local_rank=0,
        local_world_size=world_size,
        host="127.0.0.1",
        port=free_port(),
        has_store=False,
        attempt="0",
    )
    return [replace(first, rank=rank, local_rank=rank) for rank in range(world_size)]


def ignore(event: Event) -> None:
    """What a command tells is no matter here."""


def serving(place: Place) -> Service:
    return Service(place, ignore)


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread is about to do."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def leave(leader: Leadership, served: Service) -> None:
    """Let rank 0's command end, store and all, before the other listens to what it said."""
    leader.end(7, None)
    served._channel._thread.join(SECONDS)
    assert not served._channel._thread.is_alive()


def test_an_end_that_was_said_counts_though_rank_0_is_gone_when_it_is_listened_to() -> None:
    first, second = places()
    served = serving(second)
    leave(Leadership(first), served)
    assert served.run() == 7


def test_a_command_that_was_busy_for_long_listens_before_it_gives_up(
    clock: SimpleNamespace,
) -> None:
    first, second = places()
    served = serving(second)
    leave(Leadership(first), served)
    clock.ahead = 1e6
    assert served.run() == 7


def test_nothing_is_asked_of_a_store_after_the_end_was_said() -> None:
    first, second = places()
    served = serving(second)
    leave(Leadership(first), served)
    kinds = [type(heard) for _, heard in served._channel.hear(served._channel.waitables)]
    assert kinds[-1] is End


def test_rank_0_waits_for_one_that_comes_late_to_hear_the_end(
    clock: SimpleNamespace, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = places()
    leader = Leadership(first)

    def wait_long(waitables: Sequence[Connection], seconds: float) -> list[object]:
        clock.ahead = leadership._STARTING_SECONDS - 1
        return [*wait(waitables, seconds)]

    monkeypatch.setattr(leadership, "wait", wait_long)
    ending = threads.submit(leader.end, 2, ConfigError("the key is wrong"))
    until(lambda: clock.ahead > 0)
    late = channel._Post(join_store(second.address, LONG), second)
    late.send(Greeting())
    until(lambda: leader._channel.present == {1} or ending.done())
    with pytest.raises(TimeoutError):
        ending.result(leadership._FAREWELL_SECONDS / 4)
    (said,) = [letter for _, letter in late.receive() if isinstance(letter, End)]
    assert said.exit_code == 2
    late.send(Farewell())
    ending.result(SECONDS)


def test_a_command_that_goes_before_it_was_heard_was_not_joined() -> None:
    first, second = places()
    store = host_store(first.port, LONG)
    served = serving(second)
    under(store, "trace-audit/attempt-0/command-1").wait(["1/0"], LONG)  # the greeting
    del store
    Leadership(first).end(7, None)
    assert served.run() == 7


def test_a_ranks_next_command_waits_for_rank_0s_next(threads: ThreadPoolExecutor) -> None:
    first, second, third = places(3)

    def serve(place: Place) -> Future[int]:
        return threads.submit(serving(place).run)

    leader = Leadership(first)
    ended = serve(second)
    # It waits for the third rank, which has not come yet.
    ending = threads.submit(leader.end, 3, None)
    assert ended.result(SECONDS) == 3
    next_of_second = serve(second)
    tries = under(join_store(first.address, LONG), "trace-audit/attempt-0")
    until(lambda: tries.add("commands/1", 0) > 2)
    assert not ending.done()
    assert serve(third).result(SECONDS) == 3
    ending.result(SECONDS)
    assert not next_of_second.done()
    leader = Leadership(first)
    next_of_third = serve(third)
    leader.end(4, None)
    assert [served.result(SECONDS) for served in (next_of_second, next_of_third)] == [4, 4]


def test_two_commands_of_one_rank_do_not_join_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = places()
    leader = Leadership(first)
    served = serving(second)
    until(lambda: bool(leader._channel.hear(leader._channel.waitables)))
    monkeypatch.setattr(channel, "JOIN_SECONDS", 1)
    with pytest.raises(RunFailedError, match=r"another rank 1 of 2 has joined.*:\d+$") as caught:
        serving(second).run()
    assert caught.value.message.startswith("rank 0 of 2 was not met: ")
    assert "one command a RANK" in (caught.value.hint or "")
    leader.end(7, None)
    assert served.run() == 7


def test_a_rank_that_starts_first_waits_for_rank_0(threads: ThreadPoolExecutor) -> None:
    first, second = places()
    served = threads.submit(serving(second).run)
    leader = Leadership(first)
    leader.end(7, None)
    assert served.result(SECONDS) == 7
