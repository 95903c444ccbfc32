"""torch's scaled_dot_product_attention over the gathered context."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from trace_audit.attention.base import AttentionBatch, LayerSpec, visible
from trace_audit.errors import ModelError
from trace_audit.kernels.cached_heads import CachedHeads, Room
from trace_audit.kernels.runtime import to_device


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """One or more rows of equal query length, attended in one call."""

    tokens: slice  # flat tokens, rows x query_len
    blocks: torch.Tensor  # int64 [rows * num_blocks]
    num_rows: int
    positions: torch.Tensor  # int64 [rows, query_len]
    context_len: int  # padded to whole blocks

    def mask(self, window: int | None) -> torch.Tensor:
        """bool [rows, 1, query_len, context_len]; a window is relative to each query."""
        seen = visible(self.positions.flatten(), self.context_len, window)
        return seen.view(self.num_rows, 1, -1, self.context_len)


class SdpaAttention:
    """Decode rows in one padded call, each prefill chunk in its own.

    The padded length is that of the launch's longest row in whole blocks: it never depends on
    max_model_len or on the size of the cache.

    Args:
        row_by_row: attend each decode row in a call of its own, over its own length: the sums of
            a call depend on its padded length and on its number of rows.
    """

    name = "sdpa"

    def __init__(self, *, row_by_row: bool = False) -> None:
        self._row_by_row = row_by_row
        self._chunks: list[_Chunk] = []
        self._masks: dict[int | None, list[torch.Tensor]] = {}
        self._rooms = (Room(), Room())

    def check(self, layer: LayerSpec) -> None:
        """Refuse soft-capping, which scaled_dot_product_attention cannot express."""
        if layer.softcap is not None:
            raise ModelError(
                "attention_backend sdpa cannot soft-cap attention logits, which this model does",
                hint='use attention_backend = "eager" or "triton"',
            )

    def prepare(self, batch: AttentionBatch) -> None:
        """Cut the launch into calls."""
        self._masks = {}
        self._chunks = []
        start = 0 if self._row_by_row else batch.num_decode_rows
        if start:
            self._chunks.append(_chunk(batch, range(start), 0))
        for row in range(start, len(batch.query_lens)):
            self._chunks.append(_chunk(batch, range(row, row + 1), start))
            start += int(batch.query_lens[row])

    def forward(
        self, query: torch.Tensor, keys: CachedHeads, values: CachedHeads, layer: LayerSpec
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        masks = self._masks_of(layer.window, query.dtype)
        parts = [
            self._attend(query[chunk.tokens], keys, values, chunk, mask, layer)
            for chunk, mask in zip(self._chunks, masks, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend(
        self,
        query: torch.Tensor,  # [rows * Q, H, D]
        keys: CachedHeads,
        values: CachedHeads,
        chunk: _Chunk,
        mask: torch.Tensor,  # [rows, 1, Q, L]
        layer: LayerSpec,
    ) -> torch.Tensor:
        key, value = (
            _gather(cached, chunk, query.dtype, room)
            for cached, room in zip((keys, values), self._rooms, strict=True)
        )
        group = layer.num_heads // layer.num_kv_heads
        query_len = chunk.positions.shape[1]
        if query_len == 1:
            # The heads of a group become the queries of their one KV head: nothing is repeated.
            out = scaled_dot_product_attention(
                query.view(chunk.num_rows, layer.num_kv_heads, group, -1),
                key,
                value,
                attn_mask=mask.expand(-1, layer.num_kv_heads, group, -1),
                scale=layer.scale,
            )
            return out.reshape(-1, layer.num_heads, layer.value_dim)
        out = scaled_dot_product_attention(
            query.view(chunk.num_rows, query_len, layer.num_heads, -1).transpose(1, 2),
            key,
            value,
            attn_mask=mask,
            scale=layer.scale,
            enable_gqa=group > 1,
        )
        return out.transpose(1, 2).flatten(0, 1)

    def _masks_of(self, window: int | None, dtype: torch.dtype) -> list[torch.Tensor]:
        if window not in self._masks:
            # Additive: torch would otherwise build it from the boolean one in every layer.
            self._masks[window] = [
                torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(
                    ~seen, float("-inf")
                )
                for seen in (chunk.mask(window) for chunk in self._chunks)
            ]
        return self._masks[window]


def _chunk(batch: AttentionBatch, rows: range, start: int) -> _Chunk:
    picked = slice(rows.start, rows.stop)
    query_len = int(batch.query_lens[rows.start])
    context_lens = batch.context_lens[picked]
    num_blocks = -(-int(context_lens.max()) // batch.block_size)
    positions = (context_lens - query_len)[:, None] + np.arange(query_len)
    blocks = batch.block_table[picked, :num_blocks].astype(np.int64)
    return _Chunk(
        tokens=slice(start, start + len(rows) * query_len),
        blocks=to_device(blocks.ravel(), batch.device),
        num_rows=len(rows),
        positions=to_device(positions, batch.device),
        context_len=num_blocks * batch.block_size,
    )


def _gather(cached: CachedHeads, chunk: _Chunk, dtype: torch.dtype, room: Room) -> torch.Tensor:
    """The chunk's context from one side of the cache: [rows, KV, L, D]; on a CPU in `room`."""
    gathered = cached.read(chunk.blocks, dtype, room if chunk.blocks.device.type == "cpu" else None)
    shape = (chunk.num_rows, chunk.context_len, *gathered.shape[2:])
    return gathered.view(shape).transpose(1, 2)
