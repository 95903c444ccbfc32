"""One launch's inputs, built on the host and copied to the device without waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from trace_audit.attention.base import AttentionBatch
from trace_audit.engine.padding import DecodePadding, unpadded
from trace_audit.engine.proposers import PLACEHOLDER
from trace_audit.engine.request import Request
from trace_audit.engine.scheduler import ScheduledRequest
from trace_audit.kernels.runtime import to_device

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
AnyIntArray = Int32Array | Int64Array


@dataclass(frozen=True, kw_only=True)
class LogitsRow:
    """One row of a launch's logits.

    Attributes:
        scheduled: whose it is.
        position: absolute position of the token that the logits follow.
    """

    scheduled: ScheduledRequest
    position: int

    @property
    def request(self) -> Request:
        """The request."""
        return self.scheduled.request

    @property
    def step(self) -> int:
        """0-based output index of the token sampled here; negative inside the prompt."""
        return self.position + 1 - self.request.prompt_len

    @property
    def is_uncommitted(self) -> bool:
        """Whether the token sampled here can be committed; inside a prompt it cannot."""
        return self.position + 1 >= self.request.total_len


@dataclass(frozen=True, kw_only=True)
class DraftTokens:
    """The D tokens of a launch that are drafts.

    Attributes:
        index: int64 [D] on the device, their places in the flat batch.
        token_ids: int64 [D] on the device, `PLACEHOLDER` where the host does not know them.
        known: whether the host knows all of them.
        columns: int64 [T] on the device, where in its row each token's id is. A draft's own column
            holds the trace, which is not to be read; it has that of the last committed token.
    """

    index: torch.Tensor
    token_ids: torch.Tensor
    known: bool
    columns: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What the host knows of a launch: T tokens of some requests, and B rows of logits.

    Padding stands at the end of both, a token and a row each: rows of every matrix product like
    the others, but nobody's.

    Attributes:
        scheduled: the requests in order.
        rows: the rows without padding, those of a request together and in order of position.
        num_padding: rows of padding.
    """

    scheduled: Sequence[ScheduledRequest]
    rows: Sequence[LogitsRow]
    num_padding: int

    @property
    def num_tokens(self) -> int:
        """Tokens in the launch, padding included."""
        return sum(s.num_tokens for s in self.scheduled) + self.num_padding

    @property
    def num_requests(self) -> int:
        """Requests in the launch, padding included."""
        return len(self.scheduled) + self.num_padding

    @property
    def has_drafts(self) -> bool:
        """Whether any of its tokens is a draft."""
        return any(s.draft_token_ids for s in self.scheduled)

    @property
    def padded_rows(self) -> list[LogitsRow]:
        """B rows to sample: for padding the first row, whose parameters ask for nothing new."""
        return [*self.rows, *([self.rows[0]] * self.num_padding)]


@dataclass(frozen=True, kw_only=True)
class Batch(Launch):
    """A launch as a flat token batch on the device.

    Attributes:
        idx_mapping: int32 [B] on the device, row -> request slot, -1 for padding.
        token_slots: int64 [T] on the device, request slot of each token, -1 for padding.
        positions: int64 [T] on the device, absolute positions.
        logits_tokens: int64 [B] on the device, flat index of each row's token.
        attention: what the attention backend needs; it knows no padding.
        drafts: which tokens are drafts; None: no request has any.
    """

    idx_mapping: torch.Tensor
    token_slots: torch.Tensor
    positions: torch.Tensor
    logits_tokens: torch.Tensor
    attention: AttentionBatch
    drafts: DraftTokens | None


def build_batch(
    scheduled: Sequence[ScheduledRequest],
    *,
    block_size: int,
    device: torch.device,
    padding: DecodePadding = unpadded,
) -> Batch:
    """Lay the scheduled chunks out flat, row after row.

    Args:
        scheduled: the launch.
        block_size: tokens of a KV block.
        device: of the launch.
        padding: how many rows a launch of decode rows alone has.
    """
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
    logits_rows = np.repeat(np.arange(len(scheduled)), [s.num_logits for s in scheduled])
    rows_of_logits = [
        LogitsRow(scheduled=s, position=position)
        for s in scheduled
        for position in range(s.end - s.num_logits, s.end)
    ]
    # A row's token is where its position is, counted back from the end of its request's tokens.
    ends = query_starts[1:][logits_rows]
    back = np.array([row.scheduled.end - row.position for row in rows_of_logits], dtype=np.int64)
    is_decode = all(s.phase == "decode" for s in scheduled)
    num_padding = padding(len(scheduled)) - len(scheduled) if is_decode else 0
    padding_tokens = len(positions) + np.arange(num_padding)

    def padded(values: AnyIntArray, fill: int) -> torch.Tensor:
        return to_device(np.pad(values, (0, num_padding), constant_values=fill), device)

    return Batch(
        scheduled=scheduled,
        rows=rows_of_logits,
        num_padding=num_padding,
        idx_mapping=padded(slots[logits_rows].astype(np.int32), -1),
        token_slots=padded(slots[rows], -1),
        positions=padded(positions, 0),
        logits_tokens=to_device(np.concatenate([ends - back, padding_tokens]), device),
        attention=AttentionBatch(
            query_lens=query_lens,
            context_lens=starts + query_lens,
            block_table=block_table,
            block_size=block_size,
            kv_slots=to_device(kv_slots, device),
            device=device,
        ),
        drafts=_draft_tokens(scheduled, query_starts, positions, device),
    )


def _draft_tokens(
    scheduled: Sequence[ScheduledRequest],
    query_starts: Int64Array,
    positions: Int64Array,
    device: torch.device,
) -> DraftTokens | None:
    token_ids = [token for s in scheduled for token in s.draft_token_ids]
    if not token_ids:
        return None
    columns = positions.copy()
    places: list[int] = []
    for s, end in zip(scheduled, query_starts[1:].tolist(), strict=True):
        own = range(end - len(s.draft_token_ids), end)
        columns[own] = s.end - len(own) - 1
        places += own
    return DraftTokens(
        index=to_device(np.array(places, dtype=np.int64), device),
        token_ids=to_device(np.array(token_ids, dtype=np.int64), device),
        known=PLACEHOLDER not in token_ids,
        columns=to_device(columns, device),
    )


def _block_table(scheduled: Sequence[ScheduledRequest]) -> Int32Array:
    width = max(len(s.request.block_ids) for s in scheduled)
    table = np.zeros((len(scheduled), width), dtype=np.int32)
    for row, s in enumerate(scheduled):
        table[row, : len(s.request.block_ids)] = s.request.block_ids
    return table
