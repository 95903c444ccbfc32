"""Decode launches whose inputs are one small copy, so that all else of a step can be recorded.

A launch of one token a request needs few numbers from the host: which slot, position and KV slot a
row has, and its block table. They travel as one matrix; everything after it happens on the device,
at addresses that never change, and can be replayed as one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from trace_audit.attention.base import DecodeBatch
from trace_audit.engine.batch import Launch, LogitsRow
from trace_audit.engine.padding import DecodePadding
from trace_audit.engine.request_state import RequestState
from trace_audit.engine.sampler import Sampler, SamplingInputs
from trace_audit.engine.scheduler import ScheduledRequest
from trace_audit.engine.token_statistics import packed
from trace_audit.kernels.runtime import to_device
from trace_audit.models.loaded import LoadedModel

_CONTEXT_UNIT = 256  # tokens: launches whose longest context needs as many units share a recording
_SLOT, _POSITION, _KV_SLOT, _CONTEXT_LEN, _TABLE = range(5)


@dataclass(frozen=True, kw_only=True)
class DecodeInputs:
    """What a decode launch of B rows reads, on the device.

    Attributes:
        rows: int32 [B, 4 + max_blocks]: request slot (-1 for padding), position, KV slot, context
            length, block table.
        sampling: of the rows.
        num_units: how many units the longest context may have, a power of two.
        replays: whether any slot has a trace.
    """

    rows: torch.Tensor
    sampling: SamplingInputs
    num_units: int
    replays: bool

    @property
    def key(self) -> tuple[object, ...]:
        """What is equal for launches that one recording can stand for."""
        tensors = self.tensors
        return (self.num_units, self.replays, tuple((t.shape, t.dtype) for t in tensors))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of them, in a fixed order."""
        sampling = (self.sampling.support, self.sampling.uniforms)
        return [self.rows, *(tensor for tensor in sampling if tensor is not None)]


@dataclass(frozen=True, kw_only=True)
class DecodeOutputs:
    """What a decode launch of B rows leaves on the device.

    Attributes:
        tokens: int64 [B].
        statistics: int32 [B, width], see `packed`; None where a sampler makes none.
        logits: [B, V], untouched.
        expert_ids: see `ExpertChoices.of`; None where no router is looked at.
    """

    tokens: torch.Tensor
    statistics: torch.Tensor | None
    logits: torch.Tensor
    expert_ids: torch.Tensor | None


Step = Callable[[DecodeInputs], DecodeOutputs]


@dataclass(frozen=True, kw_only=True)
class DecodePath:
    """Launches of one token a request, one rank, no drafts.

    Attributes:
        loaded: the model; its attention backend decodes from tables on the device.
        state: the request rows.
        sampler: the last stage.
        block_size: tokens of a KV block.
        null_block: a KV block of nobody, for padding to write to and attend to.
        padding: how many rows a launch has.
    """

    loaded: LoadedModel
    state: RequestState
    sampler: Sampler
    block_size: int
    null_block: int
    padding: DecodePadding

    def takes(self, scheduled: Sequence[ScheduledRequest]) -> bool:
        """Whether a launch is of that kind, all its rows asking the sampler for the same."""
        requests = [s.request for s in scheduled]
        given = {request.support_token_ids is not None for request in requests}
        plain = all(s.phase == "decode" and not s.draft_token_ids for s in scheduled)
        return plain and len(given) == 1 and all(r.params.temperature == 0 for r in requests)

    def launch(self, scheduled: Sequence[ScheduledRequest]) -> Launch:
        """The launch as the host sees it."""
        rows = [LogitsRow(scheduled=s, position=s.chunk_start) for s in scheduled]
        num_padding = self.padding(len(rows)) - len(rows)
        return Launch(scheduled=scheduled, rows=rows, num_padding=num_padding)

    def inputs(self, launch: Launch) -> DecodeInputs:
        """Copy a launch's numbers to the device."""
        device = self.state.all_token_ids.gpu.device
        longest = 1 + max(row.position for row in launch.rows)
        num_units = 1 << (-(-longest // _CONTEXT_UNIT) - 1).bit_length()
        return DecodeInputs(
            rows=to_device(self._rows(launch, num_units), device),
            sampling=SamplingInputs.of(launch.padded_rows, device),
            num_units=num_units,
            replays=any(row.request.trace is not None for row in launch.rows),
        )

    def step(self, inputs: DecodeInputs) -> DecodeOutputs:
        """One launch from its inputs to its statistics; nothing here waits for the host."""
        columns = inputs.rows[:, :_TABLE].T.contiguous()
        as_indices = columns.long()
        slots, positions = columns[_SLOT], as_indices[_POSITION]
        self.loaded.attention.prepare_decode(
            DecodeBatch(
                kv_slots=as_indices[_KV_SLOT],
                context_lens=columns[_CONTEXT_LEN],
                block_table=inputs.rows[:, _TABLE:],
                max_context_len=inputs.num_units * _CONTEXT_UNIT,
            )
        )
        input_ids = self.state.gather_input_ids(as_indices[_SLOT], positions)
        logits = self.loaded.forward(input_ids, positions, None)
        assert logits is not None
        tokens, statistics = self.sampler(logits, inputs.sampling, slots, self.state)
        self.state.append_one_each(slots, tokens)
        choices = self.loaded.choices
        return DecodeOutputs(
            tokens=tokens,
            statistics=None if statistics is None else packed(statistics, tokens),
            logits=logits,
            expert_ids=None if choices is None else choices.of(None),
        )

    def _rows(self, launch: Launch, num_units: int) -> npt.NDArray[np.int32]:
        size = self.block_size
        max_blocks = -(-num_units * _CONTEXT_UNIT // size)
        rows = np.zeros((len(launch.rows) + launch.num_padding, _TABLE + max_blocks), np.int32)
        rows[:, _SLOT] = -1
        rows[:, _KV_SLOT] = self.null_block * size
        rows[:, _CONTEXT_LEN] = 1
        rows[:, _TABLE] = self.null_block
        for line, row in zip(rows, launch.rows, strict=False):
            position, table = row.position, row.request.block_ids
            line[:_TABLE] = (
                row.request.slot,
                position,
                table[position // size] * size + position % size,
                position + 1,
            )
            line[_TABLE : _TABLE + len(table)] = table
        return rows
