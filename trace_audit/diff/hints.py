"""What the logprobs of a pair give away: shifted, scaled, positive, constant, filtered out.

No numerics of a run explain these, so a reader must know them before believing any metric.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from trace_audit.diff.align import AlignedPair
from trace_audit.diff.columns import FloatArray
from trace_audit.diff.pair_rows import PIECE
from trace_audit.diff.temperature import fitted_temperature
from trace_audit.storage.import_shift import found_shift

_MIN_TOKENS = 16
# Of the squared deltas of greedy tokens. On the demo model a temperature that is off by 10 % or
# more explains 72 to 96 %, sound kernels and 8-bit weights under 16 %, broken 3-bit weights 34 %.
_MIN_EXPLAINED = 0.6
# On greedy, sampled and prompt tokens of the demo model it explains 83 to 99 %, at most 44 % of
# broken 3-bit weights, and nothing of sound ones.
_MIN_EXPLAINED_BY_TEMPERATURE = 0.8
_MIN_SCALE = 0.02


def hints(pair: AlignedPair) -> tuple[str, ...]:
    """Clauses, each with the run that it is about."""
    return (
        *_filtered_out(pair),
        *_positive(pair),
        *_constant(pair),
        *(_shifted(pair) or _scaled(pair)),
    )


def _sides(pair: AlignedPair) -> list[tuple[str, NDArray[np.float32]]]:
    """Name and logprobs of both runs, as they are stored."""
    return [
        (pair.baseline_name, pair.baseline_stored),
        (pair.candidate_name, pair.candidate_stored),
    ]


def _first_piece(pair: AlignedPair) -> list[FloatArray]:
    """Logprobs of both runs at the first rows: of a long trace enough for a hint."""
    return [stored[:PIECE].astype(np.float64) for _, stored in _sides(pair)]


def _filtered_out(pair: AlignedPair) -> Iterator[str]:
    if not pair.distribution.is_filtered:
        return
    a, b = (np.isneginf(logprob) for _, logprob in _sides(pair))
    if (a | b).any():
        yield (
            f"top_k or top_p left the forced token out in {pair.baseline_name} alone at "
            f"{int((a & ~b).sum()):,} tokens, in {pair.candidate_name} alone at "
            f"{int((b & ~a).sum()):,} and in both at {int((a & b).sum()):,}; none is in an average"
        )


def _positive(pair: AlignedPair) -> Iterator[str]:
    for name, logprob in _sides(pair):
        positive = logprob[logprob > 0]
        if len(positive):
            yield (
                f"{len(positive):,} logprobs of {name} are positive, the largest "
                f"{positive.max():g}: they were computed in low precision, or are none"
            )


def _constant(pair: AlignedPair) -> Iterator[str]:
    if pair.distribution.is_filtered:
        return  # One id that is left has logprob 0 and entropy 0, and rightly so.
    if len(pair) < _MIN_TOKENS:
        return
    for found in pair.constants:
        name = pair.candidate_name if found.candidate else pair.baseline_name
        yield (
            f"{found.column} of {name} is {found.value:g} at every token: it was not computed for "
            "these tokens"
        )


def _shifted(pair: AlignedPair) -> list[str]:
    a, b = _first_piece(pair)
    # The run that knows how it scored is in place; of two that do, the baseline.
    given, own = (pair.candidate_name, pair.baseline_name)
    if pair.baseline_name == "imported":
        given, own, a, b = own, given, b, a
    shift = found_shift(b, a, pair.sequence[:PIECE], pair.step[:PIECE])
    return [] if shift is None else [shift.words(given, own)]


def _scaled(pair: AlignedPair) -> list[str]:
    """A temperature on one side, by the other's distribution or else by its logprobs alone."""
    if pair.distribution.is_filtered:
        return []  # What is left of a distribution does not say what all of it was.
    fit = fitted_temperature(pair)
    if fit is None:
        return _one_factor(pair)
    if fit.explained < _MIN_EXPLAINED_BY_TEMPERATURE or abs(fit.temperature - 1) < _MIN_SCALE:
        return []
    return [
        f"the logprobs of {fit.given} are those of {fit.own} at a temperature of about "
        f"{fit.temperature:.2f}, which explains {fit.explained:.0%} of the squared deltas: a "
        "temperature may be on one side only"
    ]


def _one_factor(pair: AlignedPair) -> list[str]:
    """One factor between the two sides' logprobs, from a regression through the origin."""
    a, b = (logprob[pair.finite[:PIECE]] for logprob in _first_piece(pair))
    squares, deltas = float(a @ a), float((b - a) @ (b - a))
    if len(a) < _MIN_TOKENS or squares == 0 or deltas == 0:
        return []
    scale = float(a @ b) / squares
    rest = float((b - scale * a) @ (b - scale * a))
    if 1 - rest / deltas < _MIN_EXPLAINED or abs(scale - 1) < _MIN_SCALE:
        return []
    return [
        f"one scale explains {1 - rest / deltas:.0%} of the squared deltas (the logprobs of "
        f"{pair.candidate_name} are {scale:.3g} times those of {pair.baseline_name}): a "
        "temperature may be on one side only"
    ]
