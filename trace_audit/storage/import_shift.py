"""Whether imported logprobs are those of the neighbouring token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

_MIN_TOKENS = 16
# Part of what the unshifted correlation lacks to 1 that the shifted one may lack.
_MAX_REST = 0.25
_WORDS: Mapping[int, str] = MappingProxyType({1: "next", -1: "previous"})


@dataclass(frozen=True, kw_only=True)
class Shift:
    """Logprobs that fit a neighbour's far better than their own token's.

    Attributes:
        by: 1: each is that of the next token; -1: of the one before.
        correlation: With the neighbour's.
        unshifted: With the token's own.
    """

    by: int
    correlation: float
    unshifted: float

    def words(self, given: str, own: str) -> str:
        """What was found, as a clause, with the names of the two runs."""
        return (
            f"the logprobs of {given} look shifted by one: they correlate with {own}'s of the "
            f"{_WORDS[self.by]} token ({self.correlation:.3f}) far better than of the same one "
            f"({self.unshifted:.3f})"
        )


def found_shift(
    given: NDArray[np.float64],
    own: NDArray[np.float64],
    sequence: NDArray[np.integer],
    step: NDArray[np.integer],
) -> Shift | None:
    """The shift by one that explains the given logprobs, None where there is none.

    Args:
        given: [N] logprobs that may be shifted.
        own: [N] logprobs that are known to be in place.
        sequence: [N] sequence of each row, rows sorted by (sequence, step).
        step: [N] output index of each row.
    """
    unshifted = _correlation(given, own)
    # Rows i and i + 1 that are neighbours in one sequence.
    first = np.flatnonzero((np.diff(sequence) == 0) & (np.diff(step) == 1))
    if unshifted is None or len(first) < _MIN_TOKENS:
        return None
    found = {
        1: _correlation(given[first], own[first + 1]),
        -1: _correlation(given[first + 1], own[first]),
    }
    known = {by: value for by, value in found.items() if value is not None}
    if not known:
        return None
    by, best = max(known.items(), key=lambda item: item[1])
    if 1 - best > _MAX_REST * (1 - unshifted) or best <= 0:
        return None
    return Shift(by=by, correlation=best, unshifted=unshifted)


def _correlation(a: NDArray[np.float64], b: NDArray[np.float64]) -> float | None:
    """Pearson's; None where a side is constant or too little is finite."""
    finite = np.isfinite(a) & np.isfinite(b)
    a, b = a[finite], b[finite]
    if len(a) < _MIN_TOKENS or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])
