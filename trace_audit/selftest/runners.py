"""Model runners with a fault."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from trace_audit.engine.batch import Batch
from trace_audit.engine.build import MakeRunner
from trace_audit.engine.model_runner import ModelRunner, StepOutput
from trace_audit.engine.scheduler import ScheduledRequest
from trace_audit.selftest.faults import Fault, LogitNoise, OneUnit, SwappedKeys


def runner_of(fault: Fault) -> MakeRunner:
    """What makes a runner with that fault."""
    if isinstance(fault, LogitNoise):
        return partial(NoisyRunner, fault)
    if isinstance(fault, OneUnit):
        return partial(OneUnitRunner, fault)
    return partial(SwappedKeysRunner, fault)


class NoisyRunner(ModelRunner):
    """Adds `LogitNoise` to what the model computed."""

    def __init__(self, fault: LogitNoise, **arguments: Any) -> None:
        """Make a runner with noise; the rest is `ModelRunner`'s."""
        super().__init__(**arguments)
        self._fault = fault

    def _forward(self, batch: Batch, input_ids: torch.Tensor) -> torch.Tensor | None:
        logits = super()._forward(batch, input_ids)
        if logits is None:
            return None
        width = logits.shape[1]
        rows = [self._fault.of(index, position, width) for index, position in _places(batch)]
        return logits + torch.from_numpy(np.stack(rows)).to(logits)


class OneUnitRunner(ModelRunner):
    """Raises one logit of one position by one unit, as `OneUnit` says."""

    def __init__(self, fault: OneUnit, **arguments: Any) -> None:
        """Make a runner with one wrong bit; the rest is `ModelRunner`'s."""
        super().__init__(**arguments)
        self._fault = fault

    def _forward(self, batch: Batch, input_ids: torch.Tensor) -> torch.Tensor | None:
        logits = super()._forward(batch, input_ids)
        where = (self._fault.sequence_index, self._fault.position)
        if logits is None or where not in (places := _places(batch)):
            return logits
        logits = logits.clone()
        row = logits[places.index(where)]
        smallest = row.argmin()
        row[smallest] = torch.nextafter(row[smallest], torch.full_like(row[smallest], torch.inf))
        return logits


class SwappedKeysRunner(ModelRunner):
    """Swaps the keys of two pages before the launch after the second is full."""

    def __init__(self, fault: SwappedKeys, **arguments: Any) -> None:
        """Make a runner that swaps pages; the rest is `ModelRunner`'s."""
        super().__init__(**arguments)
        self._fault = fault

    def execute(self, scheduled: Sequence[ScheduledRequest]) -> Iterator[StepOutput]:
        """Run one launch, after the swap where it is due."""
        first, second = self._fault.page, self._fault.page + 1
        keys = self.kv_cache.keys[self._fault.layer].data
        for one in scheduled:
            if one.chunk_start == (second + 1) * self.block_size:
                blocks = one.request.block_ids
                keys[[blocks[first], blocks[second]]] = keys[[blocks[second], blocks[first]]]
        yield from super().execute(scheduled)


def _places(batch: Batch) -> list[tuple[int, int]]:
    """Of each row of logits: index of its sequence, absolute position of the token it is for."""
    return [(row.request.index, row.position + 1) for row in batch.padded_rows]
