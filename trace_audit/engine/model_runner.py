"""Forward, sampling and statistics of one launch; owns every tensor that outlives a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from trace_audit.attention.base import AttentionBackend, LayerSpec
from trace_audit.attention.kv_cache import KVCache
from trace_audit.config import Distribution
from trace_audit.engine.batch import Batch, Launch, build_batch
from trace_audit.engine.cuda_graphs import GraphedStep
from trace_audit.engine.decode_mode import DecodeMode
from trace_audit.engine.decode_path import DecodePath
from trace_audit.engine.draft_model import DraftModel
from trace_audit.engine.padding import DecodePadding, unpadded
from trace_audit.engine.request import Request
from trace_audit.engine.request_state import RequestState
from trace_audit.engine.sampler import Rejection, Sampler, SamplingInputs
from trace_audit.engine.scheduler import ScheduledRequest
from trace_audit.engine.token_statistics import packed
from trace_audit.engine.trace_replay import TraceKernels, TraceReplayState
from trace_audit.engine.verification import Verification, committed_rows
from trace_audit.kernels.runtime import to_device
from trace_audit.kernels.statistics import StatisticsKernels
from trace_audit.models.loaded import LoadedModel
from trace_audit.parallel.world import World


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What a launch, or a block of its rows, left on the device.

    Attributes:
        batch: the launch, or a block of its rows, B of them.
        tokens: int64 [B], sampled or overwritten; padding has some too, and there is -1 where a
            draft before it was rejected.
        statistics: `packed` of all B rows; None on a rank that does not sample.
        committed: rows whose token counts, in order.
        committed_rows: int64 [num_committed] on the device, the same.
        logits: [B, V], untouched; None on a rank that does not sample.
        expert_ids: see `ExpertChoices.of`, of this rank's layers; None where there is none.
    """

    batch: Launch
    tokens: torch.Tensor
    statistics: torch.Tensor | None
    committed: list[int]
    committed_rows: torch.Tensor
    logits: torch.Tensor | None
    expert_ids: torch.Tensor | None

    def only(self, rows: list[int]) -> StepOutput:
        """The same with some of its committed rows."""
        if rows == self.committed:
            return self
        index = to_device(np.array(rows, dtype=np.int64), self.tokens.device)
        return replace(self, committed=rows, committed_rows=index)


class ModelRunner:
    """Runs launches of one model, or of one rank's share of it.

    Every rank runs the same launches. The one that samples holds the traces and the statistics,
    and tells the others its tokens.

    Args:
        loaded: the model, or this rank's share.
        world: this rank's place.
        backend: attention backend.
        statistics_kernels: the steps from logits to statistics.
        max_num_reqs: request slots.
        max_model_len: longest sequence.
        kv_cache: of this rank's layers; its last block is nobody's, for padding.
        block_size: tokens of its blocks.
        trace_kernels: the overwrites; None: no state for traces exists.
        scored: what statistics are of.
        padding: how many rows a launch of decode rows alone has.
        decode: how decode launches run; all of them eagerly on a runner that changes what a launch
            computes, since it has its say in each.
        feeds_traces: whether traces are inputs, so that every rank's rows hold them.
        draft_model: on the rank that samples, if a model drafts.
        rejection: see `Sampler`.
    """

    def __init__(
        self,
        *,
        loaded: LoadedModel,
        world: World,
        backend: AttentionBackend,
        statistics_kernels: StatisticsKernels,
        max_num_reqs: int,
        max_model_len: int,
        kv_cache: KVCache,
        block_size: int,
        trace_kernels: TraceKernels | None,
        scored: Distribution,
        padding: DecodePadding = unpadded,
        decode: DecodeMode = "eager",
        feeds_traces: bool = False,
        draft_model: DraftModel | None = None,
        rejection: Rejection = "greedy",
    ) -> None:
        if type(self)._forward is not ModelRunner._forward or (
            type(self).execute is not ModelRunner.execute
        ):
            decode = "eager"
        cuda_graphs = decode == "cuda-graph"
        self.decode = decode
        self.device = next(loaded.model.parameters()).device
        self.block_size = block_size
        self._padding = padding
        self._loaded = loaded
        self._world = world
        self.kv_cache = kv_cache
        loaded.attention.bind(self.kv_cache, backend)
        self.trace_replay = (
            TraceReplayState(max_num_reqs, self.device, trace_kernels, fixed_addresses=cuda_graphs)
            if trace_kernels is not None and world.samples
            else None
        )
        self.request_state = RequestState(
            max_num_reqs,
            max_model_len,
            self.device,
            holds_traces=feeds_traces or self.trace_replay is not None,
            fixed_addresses=cuda_graphs,
        )
        self._sampler: Sampler | None = None
        self._decode_path: DecodePath | None = None
        if world.samples:
            self._sample_by(
                Sampler(
                    vocabulary_size=loaded.vocabulary_size,
                    device=self.device,
                    kernels=statistics_kernels,
                    trace_replay=self.trace_replay,
                    scored=scored,
                    rejection=rejection,
                )
            )
        self._draft_model = draft_model
        self._caches = [self.kv_cache, *([draft_model.kv_cache] if draft_model else [])]
        self._swapped: dict[str, list[list[torch.Tensor]]] = {}

    def _sample_by(self, sampler: Sampler) -> None:
        """Use this sampler from now on."""
        self._sampler = sampler
        if self.decode == "eager":
            return
        self._decode_path = DecodePath(
            loaded=self._loaded,
            state=self.request_state,
            sampler=sampler,
            block_size=self.block_size,
            null_block=self.kv_cache.num_blocks - 1,
            padding=self._padding,
        )
        step = self._decode_path.step
        self._decode_step = GraphedStep(step) if self.decode == "cuda-graph" else step

    def execute(self, scheduled: Sequence[ScheduledRequest]) -> Iterator[StepOutput]:
        """Run one launch, whose rows come in one block.

        The host waits for the device only where drafts have a fate that it cannot know.
        """
        self._apply_staged_writes()
        if self._decode_path is not None and self._decode_path.takes(scheduled):
            yield self._decoded(scheduled)
            return
        batch = build_batch(
            scheduled,
            block_size=self.block_size,
            device=self.device,
            padding=self._padding,
        )
        input_ids = self._input_ids(batch)
        logits = self._forward(batch, input_ids)
        tokens = torch.empty(len(batch.idx_mapping), dtype=torch.long, device=self.device)
        statistics = None
        if self._sampler is not None:
            assert logits is not None
            tokens, statistics = self._sampler(
                logits,
                SamplingInputs.of(batch.padded_rows, self.device),
                batch.idx_mapping,
                self.request_state,
                verification=None if batch.drafts is None else Verification.of(batch, input_ids),
            )
        tokens = self._world.all.broadcast(tokens, self._world.sampling_rank)
        committed = committed_rows(batch, tokens)
        rows = to_device(np.array(committed, dtype=np.int64), self.device)
        offsets = to_device(_offsets(batch, committed), self.device)
        self.request_state.append_tokens(batch.idx_mapping.long()[rows], offsets, tokens[rows])
        yield StepOutput(
            batch=batch,
            tokens=tokens,
            statistics=None if statistics is None else packed(statistics, tokens),
            logits=logits,
            committed=committed,
            committed_rows=rows,
            expert_ids=self._expert_ids(batch),
        )

    def admit(self, request: Request) -> None:
        """Give the request a slot and, if it was swapped out, its KV back."""
        self.request_state.add_request(request)
        if self.trace_replay is not None:
            self.trace_replay.add_request(request)
        contents = self._swapped.pop(request.request_id, None)
        if contents is not None:
            for cache, saved in zip(self._caches, contents, strict=True):
                cache.copy_in(request.block_ids[: saved[0].shape[0]], saved)

    def evict(self, request: Request, *, swap: bool) -> None:
        """Take the request's slot; with `swap` keep its KV on the host."""
        if swap:
            self._swapped[request.request_id] = [
                cache.copy_out(request.block_ids) for cache in self._caches
            ]
        self.release(request)

    def release(self, request: Request) -> None:
        """Free the slot of a finished or evicted request."""
        if self.trace_replay is not None:
            self.trace_replay.remove_request(request)
        self.request_state.remove_request(request)

    def _apply_staged_writes(self) -> None:
        self.request_state.apply_staged_writes()
        if self.trace_replay is not None:
            self.trace_replay.apply_staged_writes()

    def _decoded(self, scheduled: Sequence[ScheduledRequest]) -> StepOutput:
        """A launch of the decode path, every row of which is committed."""
        assert self._decode_path is not None
        launch = self._decode_path.launch(scheduled)
        outputs = self._decode_step(self._decode_path.inputs(launch))
        committed = list(range(len(launch.rows)))
        return StepOutput(
            batch=launch,
            tokens=outputs.tokens,
            statistics=outputs.statistics,
            logits=outputs.logits,
            committed=committed,
            committed_rows=torch.arange(len(committed), device=self.device),
            expert_ids=outputs.expert_ids,
        )

    def _input_ids(self, batch: Batch) -> torch.Tensor:
        """Token ids of the launch, int64 [T]: committed ones from the rows, and drafts."""
        drafts, state = batch.drafts, self.request_state
        if drafts is None:
            return state.gather_input_ids(batch.token_slots, batch.positions)
        token_ids = drafts.token_ids
        if not drafts.known:
            if self._draft_model is not None:
                token_ids = self._draft_model.draft(batch.scheduled, state)
            token_ids = self._world.all.broadcast(token_ids, self._world.sampling_rank)
        ids = state.gather_input_ids(batch.token_slots, drafts.columns)
        return ids.index_copy_(0, drafts.index, token_ids)

    def _forward(self, batch: Batch, input_ids: torch.Tensor) -> torch.Tensor | None:
        """Logits [B, V] of the batch's rows; None before the last pipeline stage."""
        if self._draft_model is not None:
            self._draft_model.follow(batch, input_ids)
        self._loaded.attention.prepare(batch.attention)
        return self._loaded.forward(input_ids, batch.positions, batch.logits_tokens)

    def _expert_ids(self, batch: Batch) -> torch.Tensor | None:
        """What the forward of the batch chose for its rows."""
        choices = self._loaded.choices
        return None if choices is None else choices.of(batch.logits_tokens)


def _offsets(batch: Batch, committed: Sequence[int]) -> npt.NDArray[np.int64]:
    """How many tokens of the same request are committed before each of the rows."""
    positions = [batch.rows[index].position for index in committed]
    lengths = [batch.rows[index].request.total_len for index in committed]
    return np.array(positions, dtype=np.int64) + 1 - np.array(lengths, dtype=np.int64)


def kv_block_bytes(layers: Sequence[LayerSpec], block_size: int, kv_cache_dtype: str) -> int:
    """Bytes of one KV block over all layers, with its scales."""
    return block_size * sum(layer.kv_bytes_per_token(kv_cache_dtype) for layer in layers)
