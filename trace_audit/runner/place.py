"""The place that the environment gives this process among ranks that something else started."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from trace_audit.config import ParallelConfig
from trace_audit.errors import ConfigError
from trace_audit.jobs import Rendezvous, is_loopback

_HINT = (
    "torchrun sets RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, LOCAL_RANK and LOCAL_WORLD_SIZE; "
    "unset them to let one command start all ranks"
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A rank whose command was started beside those of the other ranks.

    Attributes:
        rank: of all ranks.
        world_size: how many ranks there are.
        local_rank: of the ranks on this machine.
        local_world_size: how many ranks are on this machine.
        host: where rank 0 is, or torchrun's agent with its store.
        port: of the store there.
        has_store: torchrun serves the store; else rank 0's command does.
        attempt: which of torchrun's restarts this is; its store outlives them.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    port: int
    has_store: bool
    attempt: str

    @property
    def address(self) -> str:
        """Of the store, as a URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"

    @property
    def name(self) -> str:
        """`rank 1 of 4`."""
        return f"rank {self.rank} of {self.world_size}"

    def rendezvous(self, key: str, timeout_seconds: int) -> Rendezvous:
        """How this rank finds the others for one run."""
        return Rendezvous(
            rank=self.rank,
            world_size=self.world_size,
            local_rank=self.local_rank,
            local_world_size=self.local_world_size,
            store=self.address,
            key=key,
            timeout_seconds=timeout_seconds,
        )

    def check_host(self) -> None:
        """Refuse a host that this machine cannot find, which would look like a rank that is late.

        Raises:
            ConfigError: MASTER_ADDR has no address.
        """
        try:
            socket.getaddrinfo(self.host, self.port)
        except OSError as error:
            raise ConfigError(
                f"MASTER_ADDR {self.host!r} cannot be resolved: {error.strerror}", hint=_HINT
            ) from error

    def check(self, parallel: ParallelConfig) -> None:
        """Refuse a configuration that is not for this many ranks.

        Raises:
            ConfigError: rank 0 would compute alone, or wait for ranks that nobody started.
        """
        if not parallel.uses_process_group:
            if self.world_size == 1:
                return
            raise ConfigError(
                f"WORLD_SIZE is {self.world_size}, and this configuration runs in one process",
                hint='set parallel.backend = "process", or unset RANK and WORLD_SIZE',
            )
        if parallel.world_size != self.world_size:
            raise ConfigError(
                f"WORLD_SIZE is {self.world_size}, and tensor_parallel_size x "
                f"pipeline_parallel_size = {parallel.world_size}",
                hint="start as many ranks, or unset RANK and WORLD_SIZE to let one command do it",
            )


def place_of(environment: Mapping[str, str]) -> Place | None:
    """This process's place; None if nothing says that it has one.

    Raises:
        ConfigError: a variable is missing or makes no sense.
    """
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return None
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if not environment.get(name)]
    if missing:
        given = next(name for name in ("RANK", "WORLD_SIZE") if name in environment)
        raise ConfigError(f"{given} is set, and {' and '.join(missing)} not", hint=_HINT)
    world_size = _number(environment, "WORLD_SIZE", 1, None)
    rank = _number(environment, "RANK", 0, world_size - 1)
    host = environment["MASTER_ADDR"]
    local_rank, local_world_size = _local(environment, rank, world_size, host)
    return Place(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        host=host,
        port=_number(environment, "MASTER_PORT", 1, 65535),
        has_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _local(
    environment: Mapping[str, str], rank: int, world_size: int, host: str
) -> tuple[int, int]:
    """Rank on this machine and ranks there.

    Without a word on it, ranks that meet on the loopback interface are all here, and others are
    one a machine.
    """
    given = [name for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if name in environment]
    if len(given) == 1:
        # Neither follows from the other, and a wrong one picks a wrong device.
        other = "LOCAL_WORLD_SIZE" if given == ["LOCAL_RANK"] else "LOCAL_RANK"
        raise ConfigError(f"{given[0]} is set, and {other} not", hint=_HINT)
    if not given:
        return (rank, world_size) if is_loopback(host) else (0, 1)
    local_world_size = _number(environment, "LOCAL_WORLD_SIZE", 1, world_size)
    return _number(environment, "LOCAL_RANK", 0, local_world_size - 1), local_world_size


def _number(environment: Mapping[str, str], name: str, least: int, most: int | None) -> int:
    text = environment[name]
    number = int(text) if text.isascii() and text.isdigit() else -1
    if number < least or (most is not None and number > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(f"{name} is {text!r}, and must be a number {bounds}", hint=_HINT)
    return number
