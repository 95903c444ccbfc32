"""The reference backend: plain products and a float32 softmax, one request at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trace_audit.attention.base import AttentionBatch, LayerSpec, visible
from trace_audit.kernels.cached_heads import CachedHeads
from trace_audit.kernels.runtime import to_device


@dataclass(frozen=True, kw_only=True)
class _Row:
    tokens: slice  # the row's place in the flat batch
    blocks: torch.Tensor  # int64 [num_blocks] of its context
    context_len: int
    positions: torch.Tensor  # int64 [query_len]


class EagerAttention:
    """Each row is computed by itself over its own length, so it cannot depend on its neighbours."""

    name = "eager"

    def __init__(self) -> None:
        self._rows: list[_Row] = []

    def check(self, layer: LayerSpec) -> None:
        """Every layer is supported."""

    def prepare(self, batch: AttentionBatch) -> None:
        """Note each row's tokens, blocks and positions."""
        table = to_device(batch.block_table, batch.device).long()
        self._rows = []
        start = 0
        for row, (query_len, context_len) in enumerate(
            zip(batch.query_lens.tolist(), batch.context_lens.tolist(), strict=True)
        ):
            self._rows.append(
                _Row(
                    tokens=slice(start, start + query_len),
                    blocks=table[row, : -(-context_len // batch.block_size)],
                    context_len=context_len,
                    positions=torch.arange(
                        context_len - query_len, context_len, device=batch.device
                    ),
                )
            )
            start += query_len

    def forward(
        self, query: torch.Tensor, keys: CachedHeads, values: CachedHeads, layer: LayerSpec
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        return torch.cat(
            [
                _attend(
                    query[row.tokens],
                    keys.read(row.blocks, query.dtype).flatten(0, 1)[: row.context_len],
                    values.read(row.blocks, query.dtype).flatten(0, 1)[: row.context_len],
                    visible(row.positions, row.context_len, layer.window),
                    layer,
                )
                for row in self._rows
            ]
        )


def _attend(
    query: torch.Tensor,  # [Q, H, D]
    key: torch.Tensor,  # [L, KV, D]
    value: torch.Tensor,  # [L, KV, DV]
    mask: torch.Tensor,  # bool [Q, L], true where a key is seen
    layer: LayerSpec,
) -> torch.Tensor:  # [Q, H, DV]
    group = layer.num_heads // layer.num_kv_heads
    key = key.transpose(0, 1).repeat_interleave(group, dim=0)
    value = value.transpose(0, 1).repeat_interleave(group, dim=0)
    scores = _product(query.transpose(0, 1), key.transpose(1, 2)) * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return _product(weights, value).transpose(0, 1)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b accumulated in float32 and rounded once to their dtype.

    That is what a half precision product means on every device; spelled out, because oneDNN
    compiles a new one for every context length, which takes longer than the product.
    """
    return (a.float() @ b.float()).to(a.dtype)
