"""Mean |delta| by kind of token: phase, size of the launch, confidence of the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from trace_audit.diff.align import AlignedPair
from trace_audit.diff.bootstrap import Resampler
from trace_audit.diff.columns import FloatArray
from trace_audit.diff.estimators import Estimator
from trace_audit.diff.intervals import clipped
from trace_audit.diff.label_means import SLICE_EDGES
from trace_audit.diff.moments import LabelledMoments
from trace_audit.diff.pattern import Slice
from trace_audit.diff.router_totals import RouterTotals
from trace_audit.storage.schema import PHASES

WORST_SHARE = 0.01


def phase_slices(pair: AlignedPair, resampler: Resampler) -> tuple[Slice, ...]:
    """By the phase that the candidate scored a token in; empty if it does not say."""
    return _slices(pair.labels.phase, resampler, PHASES)


def launch_slices(pair: AlignedPair, resampler: Resampler) -> tuple[Slice, ...]:
    """By the tokens of the candidate's launch, 1, 2, 3 to 4, 5 to 8, ...; empty without any."""
    found = pair.labels.launch
    labels = [_power_label(i) for i in range(0 if found is None else len(found))]
    return _slices(found, resampler, labels)


def confidence_slices(pair: AlignedPair, resampler: Resampler) -> tuple[Slice, ...]:
    """By the baseline's probability of its own best token; empty if it does not have it."""
    edges = ("0", *(f"{edge:g}" for edge in SLICE_EDGES), "1")
    labels = [f"{low}-{high}" for low, high in pairwise(edges)]
    return _slices(pair.labels.confidence, resampler, labels)


def router_slices(pair: AlignedPair, resampler: Resampler) -> tuple[Slice, ...]:
    """By the layers whose router chose other experts, 0, 1, 2, 3 to 4, ...; empty if not known."""
    if not isinstance(pair.router, RouterTotals):
        return ()
    changed = pair.router.changed
    means = LabelledMoments(len(pair.group_ids))
    for piece in pair.pieces():
        finite = pair.finite[piece]
        count = changed[piece][finite].astype(np.int64)
        label = np.where(count > 0, 1 + np.ceil(np.log2(np.maximum(count, 1))), 0)
        means.add(
            label.astype(np.int64), np.abs(pair.delta[piece][finite]), pair.group[piece][finite]
        )
    labels = ["0", *(_power_label(i) for i in range(max(0, len(means) - 1)))]
    return _slices(means, resampler, labels)


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
    values.partition(len(values) - count)
    return float(values[-count:].sum()) / total


def _slices(
    means: LabelledMoments | None, resampler: Resampler, labels: Sequence[str]
) -> tuple[Slice, ...]:
    """A slice a label that has finite rows."""
    found = []
    for i, label in enumerate(labels if means is not None else ()):
        assert means is not None
        moments = means[i]
        if moments.size:
            estimate = Estimator(resampler).mean(moments)
            found.append(
                Slice(
                    label=label,
                    tokens=moments.size,
                    mean_abs_delta=estimate.value,
                    interval=clipped(estimate.interval, 0.0),
                )
            )
    return tuple(found)


def _power_label(power: int) -> str:
    low, high = 2 ** (power - 1) + 1 if power else 1, 2**power
    return f"{high}" if low >= high else f"{low}-{high}"
