"""Keys or values of one layer in the paged cache, as they are stored."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
"""The 8-bit formats, and the largest finite number each one stores before any scale."""


class Room:
    """Memory that is written again and again: pages fresh from the system cost more than a copy."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def rows(self, count: int, like: torch.Tensor) -> torch.Tensor:
        """`count` rows of the width, dtype and device of `like` [N, W], contents undefined."""
        memory, needed = self._memory, count * like.shape[1]
        if memory is None or memory.dtype != like.dtype or memory.numel() < needed:
            # Contexts grow by a block at a time.
            memory = self._memory = like.new_empty(2 * needed)
        return memory[:needed].view(count, -1)


@dataclass(frozen=True, kw_only=True)
class CachedHeads:
    """One side of a layer's cache. What is stored is what is attended to.

    Attributes:
        data: [num_blocks, block_size, KV, D], contiguous, in the dtype of the cache.
        scales: float32 [num_blocks, block_size, KV], contiguous: the factor of each token's head;
            None: no factor. NaN: the head's vector was not finite.
    """

    data: torch.Tensor
    scales: torch.Tensor | None = None

    @property
    def raw(self) -> torch.Tensor:
        """The data, 8-bit floats as uint8: torch indexes and Triton loads few of them."""
        dtype = self.data.dtype
        return self.data.view(torch.uint8) if dtype in _FP8 else self.data

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that is stored, the first index being the block."""
        return [self.raw] if self.scales is None else [self.raw, self.scales]

    @property
    def fp8(self) -> str:
        """The 8-bit float format as the kernels name it; empty for every other dtype."""
        return _FP8.get(self.data.dtype, "")

    def read(
        self, blocks: torch.Tensor, dtype: torch.dtype, room: Room | None = None
    ) -> torch.Tensor:
        """Blocks int64 [N] as [N, block_size, KV, D], rounded once to `dtype`.

        Args:
            blocks: which.
            dtype: of the result.
            room: where to gather them, until the next time it is given; None: in memory of its own.
        """
        rows = self.raw.flatten(1)
        out = None if room is None else room.rows(len(blocks), rows)
        stored = torch.index_select(rows, 0, blocks, out=out).view(-1, *self.data.shape[1:])
        stored = stored.view(self.data.dtype)
        if self.scales is None:
            return stored.to(dtype)
        return stored.float().mul_(self.scales[blocks][..., None]).to(dtype)


@dataclass(frozen=True, kw_only=True)
class CacheTarget:
    """Where a launch's keys and values of one layer go, if they are only rounded on the way.

    Attributes:
        keys, values: of the layer, in a 16 or 32 bit float dtype.
        slots: int64 [T], flat token slots.
    """

    keys: CachedHeads
    values: CachedHeads
    slots: torch.Tensor


_FP8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
