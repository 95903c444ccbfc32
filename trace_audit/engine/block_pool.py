"""Paged KV bookkeeping: which blocks are free, and which belong to whom."""

from __future__ import annotations

import heapq


class BlockPool:
    """Hands out KV block ids, lowest free id first, so that equal histories give equal tables.

    Args:
        num_blocks: blocks of the cache.
        block_size: tokens a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks nobody holds."""
        return len(self._free)

    def num_missing(self, block_ids: list[int], num_tokens: int) -> int:
        """Blocks to add to `block_ids` before it covers `num_tokens`."""
        return max(0, -(-num_tokens // self.block_size) - len(block_ids))

    def can_grow(self, block_ids: list[int], num_tokens: int) -> bool:
        """Whether `grow` would succeed."""
        return self.num_missing(block_ids, num_tokens) <= self.num_free

    def grow(self, block_ids: list[int], num_tokens: int) -> None:
        """Extend `block_ids` in place to cover `num_tokens`."""
        for _ in range(self.num_missing(block_ids, num_tokens)):
            block_ids.append(heapq.heappop(self._free))

    def shrink(self, block_ids: list[int], num_tokens: int) -> None:
        """Give back what of `block_ids` is not needed to cover `num_tokens`, in place."""
        needed = -(-num_tokens // self.block_size)
        for block_id in block_ids[needed:]:
            heapq.heappush(self._free, block_id)
        del block_ids[needed:]

    def release(self, block_ids: list[int]) -> None:
        """Give all of `block_ids` back and empty the list."""
        self.shrink(block_ids, 0)
