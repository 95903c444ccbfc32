"""What an estimate needs of one value over many tokens, gathered a batch at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
Elementwise = Callable[[NDArray[Any]], NDArray[Any]]
"""Floats or flags [n] of as many values."""

# Few enough that what is made of them stays in a core's cache.
_AT_ONCE = 65_536


class Moments:
    """Sum, spread and per-group sums of a value over N tokens in G groups.

    Attributes:
        size: Tokens, N.
        total: Sum of the value.
        totals: Sum in each group: float64 [G].
        counts: Tokens of each group: float64 [G].
    """

    def __init__(self, num_groups: int) -> None:
        """Of no tokens yet."""
        self.size = 0
        self.total = 0.0
        self.totals = np.zeros(num_groups)
        self.counts = np.zeros(num_groups)
        self._squares = 0.0

    @property
    def mean(self) -> float:
        """Of at least one token."""
        return self.total / self.size

    @property
    def variance(self) -> float:
        """Mean squared deviation from the mean, of at least one token."""
        return self._squares / self.size

    def add(
        self, values: NDArray[Any], group: NDArray[np.integer], of: Elementwise | None = None
    ) -> None:
        """Adds tokens, some at a time.

        Args:
            values: float or bool [n], finite.
            group: int [n], in [0, G).
            of: Makes of some values those that are added, so that they are never all in memory.
        """
        for start in range(0, len(values), _AT_ONCE):
            piece = slice(start, start + _AT_ONCE)
            added = values[piece] if of is None else of(values[piece])
            self._add(added.astype(np.float64, copy=False), group[piece])

    def _add(self, values: FloatArray, group: NDArray[np.integer]) -> None:
        total = float(values.sum())
        squares = values - total / len(values)
        squares *= squares
        self._merge(len(values), total, float(squares.sum()))
        # A batch has few of the groups, next to each other as a rule.
        first = int(group.min())
        local = np.subtract(group, first, dtype=np.intp)
        sums = np.bincount(local, weights=values)
        self.totals[first : first + len(sums)] += sums
        self.counts[first : first + len(sums)] += np.bincount(local)

    def _merge(self, size: int, total: float, squares: float) -> None:
        """Chan, Golub and LeVeque (1983): what is added never cancels."""
        if self.size:
            apart = total / size - self.mean
            squares += apart * apart * self.size * size / (self.size + size)
        self._squares += squares
        self.size += size
        self.total += total


class LabelledMoments:
    """Moments of a value by a label of each token."""

    def __init__(self, num_groups: int) -> None:
        """Of no tokens yet."""
        self._num_groups = num_groups
        self._found: dict[int, Moments] = {}

    def add(
        self, labels: NDArray[np.integer], values: FloatArray, group: NDArray[np.integer]
    ) -> None:
        """Adds tokens; those labelled -1 belong nowhere.

        Args:
            labels: int [n], -1 to 32,000.
            values: float64 [n], finite where the label is not -1.
            group: int [n].
        """
        # Of integers this short, a stable sort is one by radix.
        order = np.argsort(labels.astype(np.int16), kind="stable")
        values, group = values[order], group[order]
        ends = np.cumsum(np.bincount(labels + 1))
        for label in np.flatnonzero(np.diff(ends)).tolist():
            inside = slice(ends[label], ends[label + 1])
            found = self._found.setdefault(label, Moments(self._num_groups))
            found.add(values[inside], group[inside])

    def __getitem__(self, label: int) -> Moments:
        """Of one label; of no tokens if there were none."""
        return self._found.get(label) or Moments(self._num_groups)

    def __len__(self) -> int:
        """One more than the largest label."""
        return max(self._found, default=-1) + 1
