"""How the ranks of a run find each other: torch.distributed over a file or a TCP store."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from urllib.parse import unquote, urlsplit

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # torch re-exports them implicitly
    FileStore,
    PrefixStore,
    Store,
    TCPStore,
)

from trace_audit.jobs import Rendezvous, is_loopback

_START_SECONDS = 60  # a rank that still imports libraries is not one that does not answer
_LOOPBACK_INTERFACES = ("lo", "lo0")  # Linux, macOS


def connect(rendezvous: Rendezvous) -> None:
    """Join the run's ranks: make the default process group, which is always gloo's.

    It carries control and CPU tensors; groups of other backends are made beside it.

    Raises:
        torch.distributed.DistError: the store or a rank did not answer within the timeout.
    """
    _stay_on_this_machine(rendezvous)
    store = open_store(rendezvous)
    _meet(store, rendezvous)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout=timedelta(seconds=rendezvous.timeout_seconds),
    )


def disconnect() -> None:
    """Leave the default process group, and with it every other."""
    dist.destroy_process_group()


def open_store(rendezvous: Rendezvous) -> Store:
    """The store where the ranks of this run meet, for keys of this run alone.

    Raises:
        torch.distributed.DistNetworkError: nobody serves it.
    """
    timeout = timedelta(seconds=rendezvous.timeout_seconds)
    parts = urlsplit(rendezvous.store)
    if parts.scheme == "file":
        # No world size: whoever made the directory removes it, not the last to close the file.
        store: Store = FileStore(unquote(parts.path))
        store.set_timeout(timeout)
    else:
        store = join_store(rendezvous.store, timeout)
    return PrefixStore(rendezvous.key, store)


def host_store(port: int, timeout: timedelta) -> Store:
    """Serve a store to other processes, for as long as the returned object lives.

    Raises:
        torch.distributed.DistNetworkError: the port is taken.
    """
    return TCPStore("localhost", port, is_master=True, wait_for_workers=False, timeout=timeout)


def join_store(address: str, timeout: timedelta) -> Store:
    """Connect to a store that another process serves.

    Args:
        address: `tcp://HOST:PORT`.

    Raises:
        torch.distributed.DistNetworkError: nobody served one there within the timeout.
    """
    parts = urlsplit(address)
    assert parts.hostname is not None
    assert parts.port is not None
    return TCPStore(
        parts.hostname, parts.port, is_master=False, wait_for_workers=False, timeout=timeout
    )


def under(store: Store, key: str) -> Store:
    """The same store, for keys that are prefixed with `key`."""
    return PrefixStore(key, store)


def _meet(store: Store, rendezvous: Rendezvous) -> None:
    """Wait until every rank has come this far."""
    store.set(f"here/{rendezvous.rank}", "")
    everyone = [f"here/{rank}" for rank in range(rendezvous.world_size)]
    store.wait(everyone, timedelta(seconds=max(rendezvous.timeout_seconds, _START_SECONDS)))


def _stay_on_this_machine(rendezvous: Rendezvous) -> None:
    """Let gloo use the loopback interface where every rank is on this machine.

    Left alone it resolves the machine's name, which need not have an address.
    """
    parts = urlsplit(rendezvous.store)
    if parts.scheme == "file" or is_loopback(parts.hostname or ""):
        names = [name for _, name in socket.if_nameindex() if name in _LOOPBACK_INTERFACES]
        if names:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])
