"""Device memory that a run takes beside weights and KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on the device at the peak of a run.

    Attributes:
        weights: of the engine's model, shared ones once.
        kv_cache: all blocks of the cache, the null block with them.
        working: everything else that was allocated since before the engine was made.
    """

    weights: int
    kv_cache: int
    working: int

    @property
    def share(self) -> float:
        """Working memory over weights and KV cache."""
        return self.working / (self.weights + self.kv_cache)


class PeakMemory:
    """Watches a CUDA device from now on; elsewhere it sees nothing.

    Args:
        device: that the engine will run on; its model is already there.
    """

    def __init__(self, device: torch.device) -> None:
        self._watches = device.type == "cuda"
        if self._watches:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()

    def memory(self, model: Any, kv_cache_bytes: int) -> Memory | None:
        """What was allocated at the peak; None where nothing is watched.

        Args:
            model: the engine's, loaded before the watch began.
            kv_cache_bytes: of the cache, made since.
        """
        if not self._watches:
            return None
        torch.cuda.synchronize()
        working = torch.cuda.max_memory_allocated() - self._before - kv_cache_bytes
        weights = sum(parameter.nbytes for parameter in model.parameters())
        return Memory(weights=weights, kv_cache=kv_cache_bytes, working=working)
