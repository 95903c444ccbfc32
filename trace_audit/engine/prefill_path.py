"""`path = "prefill"`: a trace is scored in one pass over prompt and outputs, as a trainer does.

A launch holds one sequence, so what a sequence gets does not depend on its neighbours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from trace_audit.engine.batch import Batch, build_batch
from trace_audit.engine.block_pool import BlockPool
from trace_audit.engine.model_runner import ModelRunner, StepOutput
from trace_audit.engine.request import Phase, Request
from trace_audit.engine.sampler import SamplingInputs
from trace_audit.engine.scheduler import Counters, ScheduledRequest, SchedulerHooks
from trace_audit.engine.token_statistics import packed
from trace_audit.kernels.runtime import to_device
from trace_audit.models.head_blocks import logits_in_blocks

HEAD_ROWS = 64
"""Rows whose logits and statistics exist at once."""


class PrefillChunk(ScheduledRequest):
    """A part of a pass, however short."""

    @property
    def phase(self) -> Phase:
        """Prefill: no token of a pass waits for another."""
        return "prefill"


@dataclass(kw_only=True)
class PrefillScheduler:
    """One sequence at a time, whole or in chunks; nothing is ever preempted.

    Attributes:
        pool: the KV blocks, which hold any one sequence.
        chunk_size: most tokens of a launch; 0: a whole sequence.
        hooks: told of admissions.
    """

    pool: BlockPool
    chunk_size: int
    hooks: SchedulerHooks
    waiting: deque[Request] = field(default_factory=deque)
    running: Request | None = None
    counters: Counters = field(default_factory=Counters)

    def add(self, request: Request) -> None:
        """Queue a request behind those already waiting."""
        self.waiting.append(request)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self.running is not None or bool(self.waiting)

    def schedule(self) -> list[ScheduledRequest]:
        """The next part of the sequence at hand."""
        self.counters.steps += 1
        if self.running is None:
            self.running = self.waiting.popleft()
            self.pool.grow(self.running.block_ids, _pass_len(self.running))
            self.hooks.admit(self.running)
        return [_next_chunk(self.running, self.chunk_size)]

    def advance(self, scheduled: ScheduledRequest) -> None:
        """Note what a launch computed."""
        scheduled.request.num_computed_tokens = scheduled.end

    def finish(self, request: Request) -> None:
        """Forget the finished request and free its blocks."""
        self.running = None
        self.pool.release(request.block_ids)


def _pass_len(request: Request) -> int:
    """Tokens that go through the model: the last output is scored and leads to nothing."""
    assert request.trace is not None
    return request.prompt_len + len(request.trace) - 1


def _next_chunk(request: Request, chunk_size: int) -> PrefillChunk:
    start = request.num_computed_tokens
    rest = _pass_len(request) - start
    num_tokens = min(rest, chunk_size or rest)
    first_output = max(start, request.prompt_len - 1)
    return PrefillChunk(
        request=request,
        chunk_start=start,
        num_tokens=num_tokens,
        # A chunk inside the prompt is asked for its last row, which nobody commits.
        num_logits=max(1, start + num_tokens - first_output),
    )


class PrefillRunner(ModelRunner):
    """Runs passes: their inputs and the tokens they score are in the request's row already.

    Every rank holds the traces, since every rank needs the inputs; no token is sampled, none is
    overwritten, and ranks have none to tell each other.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments, trace_kernels=None, feeds_traces=True)

    def execute(self, scheduled: Sequence[ScheduledRequest]) -> Iterator[StepOutput]:
        """Run one launch; its rows come in blocks of `HEAD_ROWS`."""
        self._apply_staged_writes()
        batch = build_batch(scheduled, block_size=self.block_size, device=self.device)
        self._loaded.attention.prepare(batch.attention)
        blocks = logits_in_blocks(
            self._loaded,
            self.request_state.gather_input_ids(batch.token_slots, batch.positions),
            batch.positions,
            batch.logits_tokens,
            HEAD_ROWS,
        )
        for part, logits in zip(_row_blocks(batch), blocks, strict=True):
            yield self._score(part, logits)

    def _score(self, batch: Batch, logits: torch.Tensor | None) -> StepOutput:
        """Score the tokens that follow a block's rows, as the request's row has them."""
        positions = batch.positions[batch.logits_tokens]
        tokens = self.request_state.gather_input_ids(batch.idx_mapping.long(), positions + 1)
        statistics = None
        if self._sampler is not None:
            assert logits is not None
            inputs = SamplingInputs.of(batch.rows, self.device)
            tokens, statistics = self._sampler(
                logits, inputs, batch.idx_mapping, self.request_state, forced=tokens
            )
        committed = [index for index, row in enumerate(batch.rows) if row.step >= 0]
        # Nothing is appended on the device: the row holds the whole trace, and no kernel that asks
        # how far it is committed runs here.
        return StepOutput(
            batch=batch,
            tokens=tokens,
            statistics=None if statistics is None else packed(statistics, tokens),
            logits=logits,
            committed=committed,
            committed_rows=to_device(np.array(committed, dtype=np.int64), self.device),
            expert_ids=self._expert_ids(batch),
        )


def _row_blocks(batch: Batch) -> Iterator[Batch]:
    """The launch with `HEAD_ROWS` of its rows at a time."""
    for start in range(0, len(batch.rows), HEAD_ROWS):
        block = slice(start, start + HEAD_ROWS)
        yield replace(
            batch,
            rows=batch.rows[block],
            idx_mapping=batch.idx_mapping[block],
            logits_tokens=batch.logits_tokens[block],
        )
