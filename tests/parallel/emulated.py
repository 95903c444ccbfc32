"""Engines whose ranks take turns in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.tiny import Harness, engine_config
from trace_audit.config import ParallelConfig
from trace_audit.engine.build import build_engine
from trace_audit.models.split import load_split_model
from trace_audit.parallel.lockstep import Lockstep
from trace_audit.parallel.world import World, lockstep_world


def emulated(tensor: int = 1, pipeline: int = 1, **changes: Any) -> ParallelConfig:
    """A resolved configuration of emulated ranks."""
    values = {"reduction": "rank_order"} | changes
    return ParallelConfig(
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        backend="emulated",
        **values,
    )


def split_harness(
    directory: Path,
    device: torch.device,
    world: World,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Harness:
    """One rank's engine; every rank of the world makes its own at the same time."""
    loaded = load_split_model(
        directory, dtype=dtype, device=device, lm_head_dtype=dtype, world=world
    )
    config = engine_config(device=device.type, **changes)
    return Harness.around(loaded, build_engine(loaded, config, world))


@contextmanager
def emulated_harness(
    directory: Path,
    device: torch.device,
    parallel: ParallelConfig,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Iterator[Harness]:
    """Rank 0's engine, with the other ranks following it."""
    with Lockstep(parallel.world_size) as lockstep:
        worlds = [lockstep_world(parallel, lockstep, rank) for rank in range(lockstep.size)]

        def follow(rank: int) -> None:
            other = split_harness(directory, device, worlds[rank], dtype, **changes)
            other.built.engine.follow()
            other.loaded.attention.close()

        lockstep.start(follow)
        harness = split_harness(directory, device, worlds[0], dtype, **changes)
        yield harness
        harness.built.engine.close()
        harness.loaded.attention.close()
