"""The engine: schedule a launch, run it, commit its tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch

from trace_audit.engine.model_runner import ModelRunner, StepOutput
from trace_audit.engine.outputs import ExpertIds, OutputBuffer
from trace_audit.engine.prefill_path import PrefillScheduler
from trace_audit.engine.request import Request, RequestOutput
from trace_audit.engine.scheduler import Counters, Scheduler
from trace_audit.errors import RequestError, RunFailedError
from trace_audit.parallel.world import World

_MAX_STEPS_AHEAD = 64


class Engine:
    """Decodes requests with continuous batching over a paged KV cache.

    Where a run has several ranks, each has an engine: they are given the same requests, make the
    same schedule, and need to tell each other nothing but the tokens.

    Args:
        runner: the model and all device state.
        world: this rank's place.
        scheduler: who gets how many tokens, the same on every rank.
    """

    def __init__(
        self,
        *,
        runner: ModelRunner,
        world: World,
        scheduler: Scheduler | PrefillScheduler,
    ) -> None:
        self._runner = runner
        self._world = world
        self._scheduler = scheduler
        self._outputs = OutputBuffer()

    @property
    def counters(self) -> Counters:
        """What happened since the engine was made."""
        return self._scheduler.counters

    def run(
        self,
        requests: Sequence[Request],
        on_tokens: Callable[[int], None] | None = None,
        *,
        max_full_logprobs: int = 0,
    ) -> list[RequestOutput]:
        """Run requests to their end on every rank, and drain the engine. Rank 0 calls this.

        Args:
            requests: from `InputProcessor`, unique ids; they are scheduled in this order.
            on_tokens: told how many tokens each step committed.
            max_full_logprobs: the most whole distributions kept of all the requests together.

        Returns:
            One output a request, in the order given.

        Raises:
            RequestError: two requests share an id, or one can never fit the KV cache.
            RunFailedError: a replay did not commit its trace.
        """
        if not requests:
            return []
        self._check(requests)
        self._world.all.broadcast_object((list(requests), max_full_logprobs), 0)
        outputs = self._run(requests, on_tokens, max_full_logprobs)
        _check_replays(requests, outputs)
        return outputs

    def follow(self) -> None:
        """Run what rank 0 runs until it closes its engine. Every other rank calls this."""
        while (work := self._world.all.broadcast_object(None, 0)) is not None:
            requests, max_full_logprobs = work
            self._run(requests, None, max_full_logprobs)

    def close(self) -> None:
        """End the other ranks' `follow`. Rank 0 calls this."""
        self._world.all.broadcast_object(None, 0)

    def _run(
        self,
        requests: Sequence[Request],
        on_tokens: Callable[[int], None] | None,
        max_full_logprobs: int,
    ) -> list[RequestOutput]:
        self._outputs.start(max_full_logprobs)
        for request in requests:
            self._scheduler.add(request)
        with torch.inference_mode():
            while self._scheduler.has_work:
                committed = self.step()
                if on_tokens is not None:
                    on_tokens(committed)
            return self._collect(requests)

    def step(self) -> int:
        """One launch; returns the tokens it committed."""
        scheduled = self._scheduler.schedule()
        committed = sum(self._commit(output) for output in self._runner.execute(scheduled))
        for part in scheduled:
            self._scheduler.advance(part)
            if part.request.finish_reason is not None:
                self._scheduler.finish(part.request)
                self._runner.release(part.request)
        return committed

    def _collect(self, requests: Sequence[Request]) -> list[RequestOutput]:
        """The outputs, brought from the rank that samples to rank 0."""
        expert_ids = self._expert_ids()
        outputs = self._outputs.collect(list(requests), expert_ids) if self._world.samples else []
        if self._world.sampling_rank != 0:
            outputs = self._world.all.broadcast_object(outputs, self._world.sampling_rank)
        return outputs

    def _expert_ids(self) -> ExpertIds | None:
        """What the routers of all pipeline stages chose; ranks that share layers chose the same."""
        world, own = self._world, self._outputs.collect_expert_ids()
        if world.num_stages == 1:
            return own
        stages = world.all.gather_objects(own if world.tensor.rank == 0 else None)
        parts = [part for part in stages if part is not None]
        return np.concatenate(parts, axis=1) if parts else None

    def _commit(self, output: StepOutput) -> int:
        kept = []
        for index, token in zip(output.committed, self._committed_tokens(output), strict=True):
            request = output.batch.rows[index].request
            if request.finish_reason is None:  # else it stopped at a draft before this token
                request.commit(token)
                kept.append(index)
        self._outputs.add(output.only(kept))
        self._count_drafts(output)
        return len(kept)

    def _count_drafts(self, output: StepOutput) -> None:
        if not output.batch.has_drafts:
            return
        committed = Counter(output.batch.rows[i].request.request_id for i in output.committed)
        for scheduled in output.batch.scheduled:
            if scheduled.draft_token_ids:
                accepted = committed[scheduled.request.request_id] - 1
                self.counters.count_draft(len(scheduled.draft_token_ids), accepted)

    def _committed_tokens(self, output: StepOutput) -> list[int]:
        """The step's tokens: from the traces if all rows have one, else read from the device.

        A replay's schedule depends on lengths alone, so the host runs ahead of the device; a
        free request's end is known only by its token.
        """
        rows = [output.batch.rows[index] for index in output.committed]
        if all(row.request.trace is not None for row in rows):
            if self.counters.steps % _MAX_STEPS_AHEAD == 0 and output.tokens.is_cuda:
                torch.cuda.current_stream().synchronize()
            return [r.request.trace[r.step] for r in rows if r.request.trace is not None]
        return output.tokens[output.committed_rows].tolist()

    def _check(self, requests: Sequence[Request]) -> None:
        if len({r.request_id for r in requests}) != len(requests):
            raise RequestError("two requests have the same id", hint="ids must be unique")
        pool = self._scheduler.pool
        for request in requests:
            longest = request.prompt_len + request.params.max_tokens
            needed = pool.num_missing([], longest)
            if needed > pool.num_blocks:
                raise RequestError(
                    f"request {request.request_id} needs {needed} KV blocks for {longest} tokens, "
                    f"and the cache has num_kv_blocks={pool.num_blocks}",
                    hint=f"set num_kv_blocks to {needed} or more",
                )


def _check_replays(requests: Sequence[Request], outputs: Sequence[RequestOutput]) -> None:
    """The device's tokens are the evidence: the host only assumed the trace was forced."""
    for request, output in zip(requests, outputs, strict=True):
        if request.trace is not None and output.token_ids.tolist() != list(request.trace):
            raise RunFailedError(
                f"the replay of {request.request_id} did not commit its trace",
                hint="this is a bug: please report it with the configuration",
            )
