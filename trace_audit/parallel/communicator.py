"""How the ranks of a run talk: over torch.distributed, in turns within one process, or not at all.

Every rank calls the same operations in the same order. Tensors that are handed out may be changed
by whoever receives them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from trace_audit.parallel.reduction import Reduction, reduce_partials


class Communicator(Protocol):
    """One rank's view of a group.

    Attributes:
        rank: this rank's place in the group.
        size: ranks in the group.
    """

    rank: int
    size: int

    def all_reduce(self, partial: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        """The sum of every rank's `partial`, the same bits on every rank."""

    def all_gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's `part`, in rank order; shapes and dtypes must be equal."""

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """The tensor of rank `source`; the others give one of its shape and dtype."""

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Hand a tensor to rank `to`, which receives it."""

    def receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        """The tensor that rank `source` sends, of the shape and dtype of `like`."""

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order, as copies."""

    def broadcast_object(self, value: Any, source: int) -> Any:
        """A copy of the value that rank `source` gave."""


class SoloCommunicator:
    """A group of one: nothing is said."""

    rank = 0
    size = 1

    def all_reduce(self, partial: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        """`partial` itself."""
        return partial

    def all_gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """`part` alone."""
        return [part]

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """`tensor` itself."""
        return tensor

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """There is no other rank."""
        raise AssertionError("a rank alone sends nothing")

    def receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        """There is no other rank."""
        raise AssertionError("a rank alone receives nothing")

    def gather_objects(self, value: Any) -> list[Any]:
        """`value` alone."""
        return [value]

    def broadcast_object(self, value: Any, source: int) -> Any:
        """`value` itself."""
        return value


class ProcessCommunicator:
    """A group of processes.

    Args:
        ranks: the group's ranks in the world, ascending; this process is one of them.
        tensors: carries tensors (NCCL for those on a GPU).
        objects: carries Python objects (gloo).
    """

    def __init__(
        self, ranks: Sequence[int], tensors: dist.ProcessGroup, objects: dist.ProcessGroup
    ) -> None:
        self._ranks = list(ranks)
        self._tensors = tensors
        self._objects = objects
        self.rank = self._ranks.index(dist.get_rank())
        self.size = len(self._ranks)

    def all_reduce(self, partial: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        """See `Communicator.all_reduce`."""
        if reduction.order != "native":
            partials = self.all_gather(partial)
            return reduce_partials(partials, reduction.order, float32=reduction.float32)
        total = partial.float() if reduction.float32 else partial.contiguous()
        dist.all_reduce(total, group=self._tensors)
        return total.to(partial.dtype)

    def all_gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """See `Communicator.all_gather`."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part, group=self._tensors)
        return parts

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """See `Communicator.broadcast`."""
        tensor = tensor.contiguous()
        dist.broadcast(tensor, src=self._ranks[source], group=self._tensors)
        return tensor

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """See `Communicator.send`."""
        dist.send(tensor.contiguous(), dst=self._ranks[to], group=self._tensors)

    def receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        """See `Communicator.receive`."""
        tensor = torch.empty_like(like, memory_format=torch.contiguous_format)
        dist.recv(tensor, src=self._ranks[source], group=self._tensors)
        return tensor

    def gather_objects(self, value: Any) -> list[Any]:
        """See `Communicator.gather_objects`."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._objects)
        return values

    def broadcast_object(self, value: Any, source: int) -> Any:
        """See `Communicator.broadcast_object`."""
        box = [value]
        dist.broadcast_object_list(box, src=self._ranks[source], group=self._objects)
        return box[0]
