"""A model runner with a fault as it happens: a layer's KV writes that get lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from trace_audit.engine.build import MakeRunner
from trace_audit.engine.model_runner import ModelRunner, StepOutput
from trace_audit.engine.scheduler import ScheduledRequest


class LostWritesRunner(ModelRunner):
    """One layer's keys and values from `first_position` on are gone once their launch is over.

    The launch that computes them still sees them; every later one reads what the slot held before:
    zeros, or what another request left there.
    """

    def __init__(self, layer: int, first_position: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._layer = layer
        self._first_position = first_position

    def execute(self, scheduled: Sequence[ScheduledRequest]) -> Iterator[StepOutput]:
        slots = [slot for one in scheduled for slot in self._lost(one)]
        sides = (self.kv_cache.keys[self._layer], self.kv_cache.values[self._layer])
        flat = [side.data.flatten(0, 1) for side in sides]
        index = torch.tensor(slots, dtype=torch.long, device=self.device)
        before = [side[index] for side in flat]
        yield from super().execute(scheduled)
        for side, contents in zip(flat, before, strict=True):
            side[index] = contents

    def _lost(self, one: ScheduledRequest) -> list[int]:
        blocks, size = one.request.block_ids, self.block_size
        first = max(one.chunk_start, self._first_position)
        positions = range(first, one.chunk_start + one.num_tokens)
        return [blocks[p // size] * size + p % size for p in positions]


def lost_writes(layer: int, first_position: int) -> MakeRunner:
    """What makes a runner with that fault."""
    return partial(LostWritesRunner, layer, first_position)
