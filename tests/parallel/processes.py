"""Engines whose ranks are processes that talk over gloo."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.parallel.emulated import split_harness
from tests.tiny import random_prompts
from trace_audit.config import ParallelConfig
from trace_audit.engine.request import RequestOutput
from trace_audit.jobs import Rendezvous

PROMPTS = random_prompts([3, 9, 31, 17])
STEPS = 8
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A greedy run of a model whose ranks are processes."""

    directory: Path
    dtype: torch.dtype
    parallel: ParallelConfig


def run_processes(cases: Sequence[Case], meeting: Path) -> list[list[RequestOutput]]:
    """Every case, one after the other, by one set of processes."""
    size = cases[0].parallel.world_size
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    processes = [
        context.Process(target=_rank_main, args=(rank, size, list(cases), meeting, sender))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    sender.close()
    try:
        outputs: list[list[RequestOutput]] = receiver.recv()
    finally:
        for process in processes:
            process.join()
    assert [p.exitcode for p in processes] == [0] * size
    return outputs


def _rank_main(rank: int, size: int, cases: list[Case], meeting: Path, sender: Any) -> None:
    from trace_audit.parallel.rendezvous import connect, disconnect
    from trace_audit.parallel.world import process_world

    torch.set_num_threads(1)
    connect(
        Rendezvous(
            rank=rank,
            world_size=size,
            local_rank=rank,
            local_world_size=size,
            store=(meeting / "store").as_uri(),
            key="test",
            timeout_seconds=120,
        )
    )
    outputs = []
    for case in cases:
        world = process_world(case.parallel, CPU)
        harness = split_harness(case.directory, CPU, world, case.dtype)
        if rank == 0:
            outputs.append(harness.record(PROMPTS, STEPS))
            harness.built.engine.close()
        else:
            harness.built.engine.follow()
    if rank == 0:
        sender.send(outputs)
    disconnect()
