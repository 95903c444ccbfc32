"""Own Triton kernels over the paged cache: split-KV decode, varlen prefill."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from trace_audit.attention.base import AttentionBatch, DecodeBatch, LayerSpec
from trace_audit.kernels.attention_tile import AttentionOptions
from trace_audit.kernels.cached_heads import CachedHeads
from trace_audit.kernels.paged_decode import SPLIT, decode_config, paged_decode
from trace_audit.kernels.paged_prefill import paged_prefill, prefill_tile_len
from trace_audit.kernels.runtime import to_device


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Rows of one kind (all decode, or all prefill) on the device."""

    tokens: slice
    block_table: torch.Tensor  # int32 [B, max_blocks]
    context_lens: torch.Tensor  # int32 [B]
    max_context_len: int


class TritonAttention:
    """Decode rows by the split kernel, prefill chunks by the varlen kernel.

    Args:
        split: context tokens of a part of a decode row, see `split_length`.
    """

    name = "triton"

    def __init__(self, *, split: int = SPLIT) -> None:
        self._split = split
        self._decode: _Rows | None = None
        self._prefill: _Rows | None = None
        self._query_starts: torch.Tensor | None = None
        self._query_lens = np.zeros(0, dtype=np.int64)
        self._tiles: dict[int, torch.Tensor] = {}

    def check(self, layer: LayerSpec) -> None:
        """Every layer is supported."""

    def prepare(self, batch: AttentionBatch) -> None:
        """Copy each kind's block table and lengths to the device."""
        num_decode = batch.num_decode_rows
        num_rows = len(batch.query_lens)
        self._tiles = {}
        self._query_lens = batch.query_lens[num_decode:]
        self._decode = _rows(batch, slice(0, num_decode), 0) if num_decode else None
        self._prefill = None
        if num_decode < num_rows:
            self._prefill = _rows(batch, slice(num_decode, num_rows), num_decode)
            starts = np.concatenate([[0], np.cumsum(self._query_lens)]).astype(np.int32)
            self._query_starts = to_device(starts, batch.device)

    def prepare_decode(self, batch: DecodeBatch) -> None:
        """Take the tables as they are."""
        self._tiles = {}
        self._prefill = None
        self._decode = _Rows(
            tokens=slice(0, len(batch.kv_slots)),
            block_table=batch.block_table,
            context_lens=batch.context_lens,
            max_context_len=batch.max_context_len,
        )

    def forward(
        self, query: torch.Tensor, keys: CachedHeads, values: CachedHeads, layer: LayerSpec
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        options = AttentionOptions(scale=layer.scale, window=layer.window, softcap=layer.softcap)
        parts = []
        if self._decode is not None:
            rows = self._decode
            parts.append(
                paged_decode(
                    query[rows.tokens],
                    keys,
                    values,
                    rows.block_table,
                    rows.context_lens,
                    rows.max_context_len,
                    options,
                    decode_config(layer.key_dim, self._split),
                )
            )
        if self._prefill is not None:
            assert self._query_starts is not None
            rows = self._prefill
            parts.append(
                paged_prefill(
                    query[rows.tokens],
                    keys,
                    values,
                    rows.block_table,
                    self._query_starts,
                    rows.context_lens,
                    self._tiles_of(layer, query.device),
                    options,
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _tiles_of(self, layer: LayerSpec, device: torch.device) -> torch.Tensor:
        """int32 [num_tiles, 2]: prefill row, and the offset of the tile's first query in it."""
        length = prefill_tile_len(layer.key_dim, layer.value_dim)
        if length not in self._tiles:
            tiles = [
                (row, offset)
                for row, query_len in enumerate(self._query_lens.tolist())
                for offset in range(0, query_len, length)
            ]
            self._tiles[length] = to_device(np.array(tiles, dtype=np.int32), device)
        return self._tiles[length]


def _rows(batch: AttentionBatch, picked: slice, first_token: int) -> _Rows:
    context_lens = batch.context_lens[picked]
    num_tokens = int(batch.query_lens[picked].sum())
    return _Rows(
        tokens=slice(first_token, first_token + num_tokens),
        block_table=to_device(batch.block_table[picked], batch.device),
        context_lens=to_device(context_lens.astype(np.int32), batch.device),
        max_context_len=int(context_lens.max()),
    )
