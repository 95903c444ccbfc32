"""Mean |delta| by kind of token: phase, size of the launch, confidence of the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trace_audit.diff.align import AlignedPair
from trace_audit.diff.bootstrap import Resampler
from trace_audit.diff.columns import FloatArray, IntArray
from trace_audit.diff.estimators import GroupedTokens
from trace_audit.diff.intervals import clipped
from trace_audit.diff.pattern import Slice

PHASES = ("prefill", "decode", "verify")
CONFIDENCE_EDGES = (0.5, 0.9, 0.99, 0.999)
WORST_SHARE = 0.01


def phase_slices(pair: AlignedPair, resampler: Resampler) -> tuple[Slice, ...]:
    """By the phase that the candidate scored a token in; empty if it does not say."""
    phase = pair.candidate.phase
    if phase is None:
        return ()
    number = np.full(len(pair), -1)
    for i, name in enumerate(PHASES):
        number[phase == name] = i
    return _slices(pair, resampler, number, PHASES)


def launch_slices(pair: AlignedPair, resampler: Resampler) -> tuple[Slice, ...]:
    """By the tokens of the candidate's launch, 1, 2, 3 to 4, 5 to 8, ...; empty without any."""
    launch = pair.candidate.launch
    if launch is None:
        return ()
    tokens = launch[:, 0]
    number = np.where(np.isnan(tokens), -1, np.ceil(np.log2(np.maximum(tokens, 1))))
    most = int(number.max(initial=0))
    labels = [_launch_label(i) for i in range(most + 1)]
    return _slices(pair, resampler, number.astype(np.int64), labels)


def confidence_slices(pair: AlignedPair, resampler: Resampler) -> tuple[Slice, ...]:
    """By the baseline's probability of its own best token; empty if it does not have it."""
    top = pair.baseline.top_logprobs
    if top is None or not top.shape[1]:
        return ()
    best = np.exp(top[:, 0])
    number = np.searchsorted(CONFIDENCE_EDGES, best, side="right")
    number[np.isnan(best)] = -1
    edges = ("0", *(f"{edge:g}" for edge in CONFIDENCE_EDGES), "1")
    labels = [f"{low}-{high}" for low, high in pairwise(edges)]
    return _slices(pair, resampler, number, labels)


def worst_share(kl: FloatArray | None) -> float | None:
    """Part of the sum of the finite values that the largest 1 % of them hold, at least one.

    Args:
        kl: float64 [N], non-negative, or None.
    """
    if kl is None:
        return None
    values = kl[np.isfinite(kl)]
    total = float(values.sum())
    if not total > 0:
        return None
    count = max(1, round(WORST_SHARE * len(values)))
    return float(np.partition(values, len(values) - count)[-count:].sum()) / total


def _slices(
    pair: AlignedPair, resampler: Resampler, number: IntArray, labels: Sequence[str]
) -> tuple[Slice, ...]:
    """A slice a label that has finite rows; rows numbered -1 belong to none."""
    size = np.abs(pair.delta)
    found = []
    for i, label in enumerate(labels):
        inside: NDArray[np.bool_] = (number == i) & pair.finite
        if inside.any():
            estimate = GroupedTokens(pair.group[inside], resampler).mean(size[inside])
            found.append(
                Slice(
                    label=label,
                    tokens=int(inside.sum()),
                    mean_abs_delta=estimate.value,
                    interval=clipped(estimate.interval, 0.0),
                )
            )
    return tuple(found)


def _launch_label(power: int) -> str:
    low, high = 2 ** (power - 1) + 1 if power else 1, 2**power
    return f"{high}" if low >= high else f"{low}-{high}"
