"""One launch's inputs, built on the host and copied to the device without waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from trace_audit.attention.base import AttentionBatch
from trace_audit.engine.scheduler import ScheduledRequest
from trace_audit.kernels.runtime import to_device

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A flat token batch. B rows (requests), T tokens.

    Attributes:
        scheduled: the B rows in order.
        idx_mapping: int32 [B] on the device, batch row -> request slot.
        token_slots: int64 [T] on the device, request slot of each token.
        positions: int64 [T] on the device, absolute positions.
        last_tokens: int64 [B] on the device, flat index of each row's last token.
        committed: host rows whose sampled token counts.
        committed_rows: int64 [num_committed] on the device, the same.
        attention: what the attention backend needs.
    """

    scheduled: Sequence[ScheduledRequest]
    idx_mapping: torch.Tensor
    token_slots: torch.Tensor
    positions: torch.Tensor
    last_tokens: torch.Tensor
    committed: list[int]
    committed_rows: torch.Tensor
    attention: AttentionBatch

    @property
    def num_tokens(self) -> int:
        """Tokens in the launch."""
        return int(self.positions.shape[0])


def build_batch(
    scheduled: Sequence[ScheduledRequest], *, block_size: int, device: torch.device
) -> Batch:
    """Lay the scheduled chunks out flat, row after row."""
    slots = np.array([s.request.slot for s in scheduled], dtype=np.int64)
    starts = np.array([s.chunk_start for s in scheduled], dtype=np.int64)
    query_lens = np.array([s.num_tokens for s in scheduled], dtype=np.int64)
    query_starts = np.concatenate([[0], np.cumsum(query_lens)])
    rows = np.repeat(np.arange(len(scheduled)), query_lens)
    positions = np.arange(query_starts[-1]) - query_starts[rows] + starts[rows]
    block_table = _block_table(scheduled)
    kv_slots = (
        block_table[rows, positions // block_size].astype(np.int64) * block_size
        + positions % block_size
    )
    committed = [row for row, s in enumerate(scheduled) if s.commits]
    return Batch(
        scheduled=scheduled,
        idx_mapping=to_device(slots.astype(np.int32), device),
        token_slots=to_device(slots[rows], device),
        positions=to_device(positions, device),
        last_tokens=to_device(query_starts[1:] - 1, device),
        committed=committed,
        committed_rows=to_device(np.array(committed, dtype=np.int64), device),
        attention=AttentionBatch(
            query_lens=query_lens,
            context_lens=starts + query_lens,
            block_table=block_table,
            block_size=block_size,
            kv_slots=to_device(kv_slots, device),
            device=device,
        ),
    )


def _block_table(scheduled: Sequence[ScheduledRequest]) -> Int32Array:
    width = max(len(s.request.block_ids) for s in scheduled)
    table = np.zeros((len(scheduled), width), dtype=np.int32)
    for row, s in enumerate(scheduled):
        table[row, : len(s.request.block_ids)] = s.request.block_ids
    return table
