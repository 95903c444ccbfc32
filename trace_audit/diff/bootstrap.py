"""Seeded bootstrap over groups: whole groups are drawn, since their tokens share their drift."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Lock

import numpy as np
from numpy.typing import NDArray

NUM_DRAWS = 2000
_SEED = 20_240_607
_CACHED_ELEMENTS = 20_000_000
# Few enough that their copy in float64 stays in a core's cache.
_CHUNK_ELEMENTS = 65_536


class Resampler:
    """Draws groups with replacement; the same draws for every metric of a comparison.

    Sharing the draws keeps metrics and candidates paired, and a report reproducible.
    """

    def __init__(self, num_groups: int) -> None:
        """Draws from ``num_groups`` groups, at least 1."""
        if num_groups < 1:
            raise ValueError(f"a bootstrap needs at least one group, got {num_groups}")
        self.num_groups = num_groups
        self._cached: list[NDArray[np.float32]] | None = None
        self._lock = Lock()

    def sums(self, columns: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sums of per-group columns over each draw.

        Args:
            columns: float64 [G, C].

        Returns:
            float64 [NUM_DRAWS, C].
        """
        with self._lock:
            if self._cached is None and NUM_DRAWS * self.num_groups <= _CACHED_ELEMENTS:
                self._cached = list(self._weight_chunks())
        chunks = self._weight_chunks() if self._cached is None else self._cached
        # A chunk at a time: a product with float64 makes a copy of the float32 weights.
        return np.concatenate([chunk @ columns for chunk in chunks])

    def _weight_chunks(self) -> Iterator[NDArray[np.float32]]:
        generator = np.random.Generator(np.random.PCG64(_SEED))
        rows = max(1, min(NUM_DRAWS, _CHUNK_ELEMENTS // self.num_groups))
        for start in range(0, NUM_DRAWS, rows):
            yield self._weights(generator, min(rows, NUM_DRAWS - start))

    def _weights(self, generator: np.random.Generator, rows: int) -> NDArray[np.float32]:
        """How often each group was drawn: float32 [rows, G], each row summing to G."""
        size = self.num_groups
        drawn = generator.integers(0, size, size=(rows, size))
        drawn += (np.arange(rows) * size)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=rows * size)
        return counts.reshape(rows, size).astype(np.float32)
