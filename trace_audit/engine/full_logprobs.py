"""Whole rows of log-probabilities, kept on the host while requests run."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch


@dataclass(order=True)
class _Kept:
    """A row; the one that gives way first compares as the smallest."""

    urgency: float
    order: int
    request_id: str = field(compare=False)
    step: int = field(compare=False)
    row: torch.Tensor = field(compare=False)


class FullLogprobs:
    """Keeps the wanted rows of smallest priority, at most so many of them.

    How long a free request gets is not known before its end, so a row is kept when it is sampled
    and dropped when enough others of smaller priority have come. The priorities alone decide what
    is left in the end, in whatever order the rows came.

    Args:
        at_most: rows kept; each takes vocabulary x 4 bytes of host memory.
    """

    def __init__(self, at_most: int) -> None:
        self._at_most = at_most
        self._kept: list[_Kept] = []
        self._offered = 0

    def wants(self, priority: float) -> bool:
        """Whether a row of this priority is one of the smallest so far; infinity never is."""
        if not priority < float("inf") or not self._at_most:
            return False
        return len(self._kept) < self._at_most or -priority > self._kept[0].urgency

    def keep(
        self,
        request_id: str,
        step: int,
        priority: float,
        logits: torch.Tensor,
        logsumexp: torch.Tensor,
    ) -> None:
        """Keep a row that is wanted; nothing here waits for the device.

        Args:
            request_id: whose row it is.
            step: 0-based output step.
            priority: as `wants` was asked.
            logits: [V], untouched.
            logsumexp: float32 [], their normalizer.
        """
        row = torch.empty(
            logits.shape, dtype=torch.float32, device="cpu", pin_memory=logits.is_cuda
        )
        row.copy_(logits.float() - logsumexp, non_blocking=True)
        # Of equal priorities the row that came first stays.
        kept = _Kept(-priority, -self._offered, request_id, step, row)
        self._offered += 1
        if len(self._kept) < self._at_most:
            heapq.heappush(self._kept, kept)
        else:
            heapq.heappushpop(self._kept, kept)

    def collect(
        self, request_id: str, vocabulary_size: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """One request's rows, once the device is done; they are handed over.

        Returns:
            int32 [n] steps, ascending; float32 [n, V] natural-log probabilities.
        """
        mine = [kept for kept in self._kept if kept.request_id == request_id]
        self._kept = [kept for kept in self._kept if kept.request_id != request_id]
        mine.sort(key=lambda kept: kept.step)
        rows = np.empty((len(mine), vocabulary_size), dtype=np.float32)
        for i, kept in enumerate(mine):
            rows[i] = kept.row.numpy()
        return np.array([kept.step for kept in mine], dtype=np.int32), rows
