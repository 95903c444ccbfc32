"""What attention is asked: the shapes of layers and launches, and the protocol of a backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from trace_audit.config.kv_formats import KV_FORMATS
from trace_audit.kernels.cached_heads import CachedHeads


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """Shapes and options of one layer's attention, as the model's own call states them.

    Attributes:
        num_heads, num_kv_heads: query heads and key/value heads.
        key_dim, value_dim: widths of a key and a value head.
        scale: factor on the query-key product.
        window: a token sees itself and window - 1 tokens before it; None: all before it.
        softcap: logits become softcap * tanh(logits / softcap); None: unchanged.
    """

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None
    softcap: float | None

    def kv_bytes_per_token(self, kv_cache_dtype: str) -> int:
        """Bytes of one token's key and value in this layer, with what stands beside them."""
        stored = KV_FORMATS[kv_cache_dtype]
        return self.num_kv_heads * (stored.bytes_of(self.key_dim) + stored.bytes_of(self.value_dim))


@dataclass(frozen=True, kw_only=True)
class AttentionBatch:
    """What a launch looks like to attention. Rows are requests; decode rows come first.

    Padding rows of a launch are none of these: they write no key and attend to nothing.

    Attributes:
        query_lens: int64 [B] on the host, tokens of each row in this launch.
        context_lens: int64 [B] on the host, tokens each row has once they are written.
        block_table: int32 [B, max_blocks] on the host, rows padded by block 0.
        block_size: tokens a block.
        kv_slots: int64 [T] on the device, where each token's key and value go in the cache; tokens
            of the launch past these are padding.
        device: the device of the launch.
    """

    query_lens: npt.NDArray[np.int64]
    context_lens: npt.NDArray[np.int64]
    block_table: npt.NDArray[np.int32]
    block_size: int
    kv_slots: torch.Tensor
    device: torch.device

    @property
    def num_decode_rows(self) -> int:
        """Leading rows with a single token."""
        return int((self.query_lens == 1).sum())


@dataclass(frozen=True, kw_only=True)
class DecodeBatch:
    """A launch of one token a row, all of it on the device; see `AttentionBatch`.

    Attributes:
        kv_slots: int64 [B].
        context_lens: int32 [B].
        block_table: int32 [B, max_blocks], entries of a row contiguous.
        max_context_len: at least the largest of `context_lens`, known on the host.
    """

    kv_slots: torch.Tensor
    context_lens: torch.Tensor
    block_table: torch.Tensor
    max_context_len: int


class AttentionBackend(Protocol):
    """Attention of one launch, layer by layer."""

    name: str

    def check(self, layer: LayerSpec) -> None:
        """Refuse a layer this backend cannot honour (ModelError)."""

    def prepare(self, batch: AttentionBatch) -> None:
        """Build what every layer of the launch shares."""

    def forward(
        self, query: torch.Tensor, keys: CachedHeads, values: CachedHeads, layer: LayerSpec
    ) -> torch.Tensor:
        """Attend from query [T, num_heads, key_dim] to one layer's cache.

        Keys and values are what the cache holds, rounded to the query's dtype.

        Returns:
            [T, num_heads, value_dim] in the query's dtype.
        """


@runtime_checkable
class DecodesOnDevice(Protocol):
    """A backend that can decode without asking the host anything."""

    def prepare_decode(self, batch: DecodeBatch) -> None:
        """`AttentionBackend.prepare` for a launch whose tables are on the device."""


def visible(positions: torch.Tensor, context_len: int, window: int | None) -> torch.Tensor:
    """Which keys each query sees: bool [num_queries, context_len].

    Args:
        positions: int64 [num_queries], absolute positions of the queries.
        context_len: keys, at positions 0..context_len - 1.
        window: see `LayerSpec.window`.
    """
    distance = positions[:, None] - torch.arange(context_len, device=positions.device)
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)
