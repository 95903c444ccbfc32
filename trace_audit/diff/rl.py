"""Importance ratios on sampled tokens: rho = exp(delta), A the rollout and B the trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from trace_audit.diff.align import AlignedPair
from trace_audit.diff.catalog import absent, metric
from trace_audit.diff.catalog_rl import RL
from trace_audit.diff.columns import FloatArray
from trace_audit.diff.estimators import Estimate, GroupedTokens
from trace_audit.diff.intervals import clipped
from trace_audit.diff.metric import Interval, Metric

CLIP = 0.2
CLAMP = 2.0

Grouped = Callable[[NDArray[np.bool_]], GroupedTokens]


def rl_metrics(pair: AlignedPair, grouped: Grouped, reason: str | None) -> list[Metric]:
    """The section "rl" of the table.

    Args:
        pair: The aligned runs, with at least one finite row.
        grouped: Groups of some of its rows.
        reason: Why the tokens are no sample of the baseline; None if they are one.
    """
    if reason is not None:
        return [absent(name, reason) for name in RL]
    delta = pair.finite_values(pair.delta)
    ratio = np.exp(delta)
    tokens = grouped(pair.finite)
    return [
        metric("clip.high", tokens.share(ratio > 1 + CLIP)),
        metric("clip.low", tokens.share(ratio < 1 - CLIP)),
        metric("ess.share", ess_share(tokens, ratio)),
        metric("ess.clamped", ess_share(tokens, np.minimum(ratio, CLAMP))),
        metric("rho.chi2", _shifted(tokens.mean(ratio**2), -1.0)),
        *_sequence_ratios(pair, grouped),
        _perplexity_gap(tokens.mean(-delta)),
    ]


def ess_share(tokens: GroupedTokens, weights: FloatArray) -> Estimate:
    """(sum w)^2 / (N sum w^2) with the interval of its linearization.

    Args:
        tokens: Groups of N tokens.
        weights: float64 [N], non-negative, not all zero.
    """
    first, second = float(weights.mean()), float((weights**2).mean())
    share = first**2 / second
    # First-order terms around the means: their average is the share itself.
    linear = share + 2 * first / second * (weights - first) - share / second * (weights**2 - second)
    estimate = tokens.mean(linear)
    # A function of two means has no design effect of its own.
    return Estimate(value=share, interval=clipped(estimate.interval, 0.0, 1.0))


def _sequence_ratios(pair: AlignedPair, grouped: Grouped) -> list[Metric]:
    rows = pair.finite
    present, sequence = np.unique(pair.sequence[rows], return_inverse=True)
    counts = np.bincount(sequence)
    logs = np.bincount(sequence, weights=pair.delta[rows]) / counts
    # One row a sequence, so that the interval's groups are those of the tokens.
    firsts = np.zeros(len(pair), dtype=np.bool_)
    firsts[np.flatnonzero(rows)[np.unique(sequence, return_index=True)[1]]] = True
    ratios = np.exp(logs)
    farthest = int(np.argmax(np.abs(logs)))
    name = pair.trace.sequence_ids[int(present[farthest])]
    worst = metric("rho.worst", Estimate(value=float(ratios[farthest])), note=f"sequence {name}")
    return [metric("rho.geometric", replace(grouped(firsts).mean(ratios), effective_n=None)), worst]


def _perplexity_gap(estimate: Estimate) -> Metric:
    if estimate.value == 0:
        return metric("logppl.gap", estimate, note="both runs are as sure of the tokens")
    surer = "less" if estimate.value > 0 else "more"
    note = f"the candidate is {surer} sure of the tokens than the baseline"
    return metric("logppl.gap", estimate, note=note)


def _shifted(estimate: Estimate, by: float) -> Estimate:
    bounds = estimate.interval
    if bounds is not None:
        bounds = Interval(low=bounds.low + by, high=bounds.high + by, method=bounds.method)
    return replace(estimate, value=estimate.value + by, interval=bounds)
