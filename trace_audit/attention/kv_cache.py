"""The paged KV cache of one engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from trace_audit.attention.base import LayerSpec
from trace_audit.kernels import reference
from trace_audit.kernels.cached_heads import LARGEST, CachedHeads


class CacheKernels(Protocol):
    """How heads are written, as Triton kernels or as their references; they agree in every bit."""

    @property
    def write_plain(self) -> Callable[..., None]:
        """See `trace_audit.kernels.kv_cache.write_plain`."""

    @property
    def write_quantized(self) -> Callable[..., None]:
        """See `trace_audit.kernels.kv_cache.write_quantized`."""


class KVCache:
    """Keys and values of every layer in blocks of tokens.

    Args:
        layers: shapes of the layers.
        num_blocks, block_size: how many blocks, of how many tokens.
        dtype: what is stored; a float dtype that the model does not compute in is rounded to on
            writing and from on reading.
        scaled: a factor of its own for every token and head; always with int8.
        device: where.
        kernels: how heads are written.

    Attributes:
        keys, values: per layer.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scaled: bool = False,
        kernels: CacheKernels = reference,
    ) -> None:
        assert scaled or dtype != torch.int8
        self._kernels = kernels
        self.num_blocks = num_blocks

        def cache(layer: LayerSpec, width: int) -> CachedHeads:
            shape = (num_blocks, block_size, layer.num_kv_heads)
            # Zeros, not empty: padded rows of a gathered context are multiplied by probability 0,
            # and 0 * NaN from stale memory would be NaN.
            return CachedHeads(
                data=torch.zeros((*shape, width), dtype=dtype, device=device),
                scales=torch.zeros(shape, device=device) if scaled else None,
            )

        self.keys = [cache(layer, layer.key_dim) for layer in layers]
        self.values = [cache(layer, layer.value_dim) for layer in layers]

    def write(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, kv_slots: torch.Tensor
    ) -> None:
        """Store key and value [T, num_kv_heads, head_dim] at flat token slots int64 [T]."""
        keys, values = self.keys[layer], self.values[layer]
        if keys.data.dtype in LARGEST:
            self._kernels.write_quantized(key, kv_slots, keys)
            self._kernels.write_quantized(value, kv_slots, values)
        else:
            self._kernels.write_plain(key, value, kv_slots, keys, values)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that is stored, scales included; the first index is the block."""
        return [tensor for cached in (*self.keys, *self.values) for tensor in cached.tensors]

    def copy_out(self, block_ids: Sequence[int]) -> list[torch.Tensor]:
        """Contents of the blocks on the host, bit for bit, in the order of `tensors`."""
        tensors = self.tensors
        index = torch.tensor(block_ids, device=tensors[0].device)
        return [cache[index].cpu() for cache in tensors]

    def copy_in(self, block_ids: Sequence[int], contents: Sequence[torch.Tensor]) -> None:
        """Put what `copy_out` returned into other blocks."""
        tensors = self.tensors
        index = torch.tensor(block_ids, device=tensors[0].device)
        for cache, saved in zip(tensors, contents, strict=True):
            cache[index] = saved.to(cache.device)
