"""One rank's place in a run: its tensor-parallel group, its pipeline stage, who samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from trace_audit.config import ParallelConfig
from trace_audit.errors import ConfigError
from trace_audit.parallel.communicator import (
    Communicator,
    ProcessCommunicator,
    SoloCommunicator,
)
from trace_audit.parallel.lockstep import Lockstep, LockstepCommunicator
from trace_audit.parallel.reduction import Reduction


@dataclass(frozen=True, kw_only=True)
class World:
    """One rank's view of all ranks. Rank = stage * tensor-parallel size + tensor rank.

    Attributes:
        all: every rank of the run.
        tensor: the ranks that share this one's layers.
        stage: which part of the layers this rank has.
        num_stages: pipeline-parallel size.
        reduction: how partial sums are added.
        transport: what carries tensors: "none", "emulated", "gloo" or "nccl".
    """

    all: Communicator
    tensor: Communicator
    stage: int
    num_stages: int
    reduction: Reduction
    transport: str

    @property
    def is_split(self) -> bool:
        """Whether this rank's model is made of shards, be it one; false for a run without ranks."""
        return self.transport != "none"

    @property
    def is_first_stage(self) -> bool:
        """Whether token ids enter here."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether logits come out here."""
        return self.stage == self.num_stages - 1

    @property
    def sampling_rank(self) -> int:
        """The rank that samples, holds the traces and keeps the statistics."""
        return (self.num_stages - 1) * self.tensor.size

    @property
    def samples(self) -> bool:
        """Whether this is the rank that samples."""
        return self.all.rank == self.sampling_rank

    @property
    def previous_rank(self) -> int:
        """The rank whose hidden states this one goes on from."""
        return self.all.rank - self.tensor.size

    @property
    def next_rank(self) -> int:
        """The rank that goes on from this one's hidden states."""
        return self.all.rank + self.tensor.size


def single_world() -> World:
    """A run without ranks."""
    solo = SoloCommunicator()
    return World(
        all=solo,
        tensor=solo,
        stage=0,
        num_stages=1,
        reduction=Reduction(order="rank_order"),
        transport="none",
    )


def lockstep_world(parallel: ParallelConfig, lockstep: Lockstep, rank: int) -> World:
    """The world of an emulated rank.

    Args:
        parallel: resolved.
        lockstep: shared by all ranks.
        rank: this one.
    """
    size = parallel.tensor_parallel_size
    stage = rank // size
    return World(
        all=LockstepCommunicator(lockstep, "all", range(lockstep.size), rank),
        tensor=LockstepCommunicator(
            lockstep, "tensor", range(stage * size, (stage + 1) * size), rank
        ),
        stage=stage,
        num_stages=parallel.pipeline_parallel_size,
        reduction=reduction_of(parallel),
        transport="emulated",
    )


def process_world(parallel: ParallelConfig, device: torch.device) -> World:
    """The world of this process, whose default process group is up.

    Args:
        parallel: resolved, the same on every rank.
        device: of this rank's tensors.

    Raises:
        ConfigError: the process group has another size.
    """
    if dist.get_world_size() != parallel.world_size:
        raise ConfigError(
            f"{dist.get_world_size()} ranks have joined, and tensor_parallel_size x "
            f"pipeline_parallel_size = {parallel.world_size}",
            hint="start as many ranks as the configuration has",
        )
    size, rank = parallel.tensor_parallel_size, dist.get_rank()
    everyone = range(dist.get_world_size())
    stages = [range(s * size, (s + 1) * size) for s in range(parallel.pipeline_parallel_size)]
    nccl = device.type == "cuda"
    timeout = timedelta(seconds=parallel.timeout_seconds)
    return World(
        all=_communicator(everyone, nccl, timeout),
        # Every rank takes part in making every group.
        tensor=[_communicator(ranks, nccl, timeout) for ranks in stages][rank // size],
        stage=rank // size,
        num_stages=len(stages),
        reduction=reduction_of(parallel),
        transport="nccl" if nccl else "gloo",
    )


def reduction_of(parallel: ParallelConfig) -> Reduction:
    """The resolved configuration's reduction; at TP 1, where it stays "auto", any will do."""
    order = parallel.reduction
    return Reduction(
        order="rank_order" if order == "auto" else order,
        float32=parallel.reduction_dtype == "float32",
    )


def _communicator(
    ranks: Sequence[int], nccl: bool, timeout: timedelta
) -> ProcessCommunicator | SoloCommunicator:
    objects = dist.new_group(list(ranks), backend="gloo", timeout=timeout)
    tensors = dist.new_group(list(ranks), backend="nccl", timeout=timeout) if nccl else objects
    if dist.get_rank() not in ranks:
        return SoloCommunicator()  # another stage's; never used here
    return ProcessCommunicator(ranks, tensors, objects)
