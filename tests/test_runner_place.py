"""What the environment says of a rank's place, and what it cannot mean."""

from __future__ import annotations

import pytest

from trace_audit.config import ParallelConfig
from trace_audit.errors import ConfigError
from trace_audit.runner.place import Place, place_of

BY_HAND = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "2950"}


def place(**changes: str) -> Place:
    found = place_of({**BY_HAND, **changes})
    assert found is not None
    return found


def test_without_variables_there_is_no_place() -> None:
    assert place_of({"MASTER_ADDR": "node0", "LOCAL_RANK": "1"}) is None


def test_by_hand_on_machines_of_a_rank_each() -> None:
    found = place()
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (1, 4, 0, 1)
    assert found.address == "tcp://node0:2950"
    assert not found.has_store


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_ranks_that_meet_on_the_loopback_interface_are_on_one_machine(host: str) -> None:
    found = place(MASTER_ADDR=host)
    assert (found.local_rank, found.local_world_size) == (1, 4)
    assert found.address == f"tcp://{'[::1]' if host == '::1' else host}:2950"


def test_by_torchrun() -> None:
    found = place(
        LOCAL_RANK="1",
        LOCAL_WORLD_SIZE="2",
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="3",
    )
    assert (found.local_rank, found.local_world_size) == (1, 2)
    assert found.has_store
    assert found.attempt == "3"
    rendezvous = found.rendezvous("key", 7)
    assert (rendezvous.local_rank, rendezvous.local_world_size) == (1, 2)
    assert (rendezvous.store, rendezvous.key) == ("tcp://node0:2950", "key")


@pytest.mark.parametrize("name", BY_HAND)
def test_a_missing_variable_is_named(name: str) -> None:
    given = {key: value for key, value in BY_HAND.items() if key != name}
    with pytest.raises(ConfigError, match=f"{name} not"):
        place_of(given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "4"}, "RANK is '4', and must be a number from 0 to 3"),
        ({"RANK": "-1"}, "RANK is '-1'"),
        ({"RANK": "one"}, "RANK is 'one'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0', and must be a number at least 1"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK is set, and LOCAL_WORLD_SIZE not"),
        ({"LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE is set, and LOCAL_RANK not"),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK is '2'"),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE is '5'"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place(**changes)


@pytest.mark.parametrize(
    ("world_size", "parallel", "said"),
    [
        (4, ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2), ""),
        (4, ParallelConfig(tensor_parallel_size=2), "WORLD_SIZE is 4, and .* = 2"),
        (4, ParallelConfig(tensor_parallel_size=4, backend="emulated"), "in one process"),
        (4, ParallelConfig(), "in one process"),
        (1, ParallelConfig(), ""),
        (1, ParallelConfig(tensor_parallel_size=4, backend="emulated"), ""),
        (1, ParallelConfig(backend="process"), ""),
        (1, ParallelConfig(tensor_parallel_size=2), "WORLD_SIZE is 1, and .* = 2"),
    ],
)
def test_the_configuration_is_for_as_many_ranks(
    world_size: int, parallel: ParallelConfig, said: str
) -> None:
    found = place(RANK="0", WORLD_SIZE=str(world_size))
    if not said:
        found.check(parallel)
        return
    with pytest.raises(ConfigError, match=said):
        found.check(parallel)


def test_a_host_without_an_address_is_refused_by_name() -> None:
    place(MASTER_ADDR="127.0.0.1").check_host()
    with pytest.raises(ConfigError, match=r"MASTER_ADDR 'nosuch\.invalid' cannot be resolved"):
        place(MASTER_ADDR="nosuch.invalid").check_host()
