"""KL rows of the metric table, and the rules on when each may be printed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from trace_audit.diff.align import AlignedPair
from trace_audit.diff.catalog import absent, as_lower_bound, metric
from trace_audit.diff.estimators import Estimator, GroupedTokens
from trace_audit.diff.kl_totals import KLTotals
from trace_audit.diff.summary import KLCoverage, Metric

Grouped = Callable[[NDArray[np.bool_]], GroupedTokens]

MAX_HEAVY_SHARE = 0.05
_SAMPLED_BY = {"sampled": "record", "imported": "imported"}


def kl_metrics(
    pair: AlignedPair, grouped: Grouped, estimator: Estimator, *, excess_refused: str | None
) -> list[Metric]:
    """The section "kl" of the table.

    Args:
        pair: The aligned runs.
        grouped: Groups of some of its rows.
        estimator: Of what was summed up of it.
        excess_refused: Why `kl.excess` has no meaning here; None if it has one.
    """
    forward, reverse = pair.kl.forward, pair.kl.reverse
    faults = 0 if forward is None else forward.faults
    return [
        *_direction(estimator, forward, "kl.mean", "kl.lower", faults),
        *_direction(estimator, reverse, "kl.reverse", "kl.reverse_lower", faults),
        _excess(pair, estimator, excess_refused),
        *_sampled_estimators(pair, grouped),
    ]


def kl_coverage(pair: AlignedPair) -> KLCoverage | None:
    """How many rows the forward KL used and left out."""
    forward, reverse = pair.kl.forward, pair.kl.reverse
    if forward is None or reverse is None:
        return None
    return KLCoverage(
        used=forward.usable,
        no_support=forward.no_support,
        non_finite=forward.non_finite,
        infinite=forward.infinite,
        heavy_tail_share=reverse.heavy_share,
    )


def _excess(pair: AlignedPair, estimator: Estimator, refused: str | None) -> Metric:
    """KL(record || candidate) over KL(record || baseline), on the rows that have both."""
    if refused is not None:
        return absent("kl.excess", refused)
    kl = pair.kl.record
    if kl is None:
        return absent("kl.excess", "a run has no logprobs at the fixed support")
    if not kl.near_used.total > 0:
        return absent("kl.excess", f"{pair.baseline_name} equals the record; gate on kl.mean")
    excess = metric("kl.excess", estimator.ratio(kl.far_used, kl.near_used))
    return replace(excess, unbounded=kl.far.faults)


def _direction(
    estimator: Estimator, terms: KLTotals | None, name: str, bound: str, faults: int
) -> list[Metric]:
    if terms is None:
        reason = "a run has no logprobs at the fixed support"
        return [absent(name, reason), absent(bound, reason)]
    if not terms.usable:
        reason = _why_unusable(terms)
        return [absent(name, reason), absent(bound, reason)]
    lower = estimator.mean(terms.lower_bound)
    share = terms.heavy_share
    if share is not None and share > MAX_HEAVY_SHARE:
        # Few draws then stand for a tail they were not drawn from; only the bound is sound.
        note = f"{share:.0%} of the estimate comes from tails over 4 times the record run's"
        return [as_lower_bound(metric(name, lower), note), metric(bound, lower)]
    infinite = terms.infinite
    note_infinite = f"infinite at {infinite} tokens, which are left out" if infinite else None
    value = metric(name, estimator.mean(terms.estimate), note=note_infinite)
    return [replace(value, unbounded=faults), metric(bound, lower)]


def _why_unusable(terms: KLTotals) -> str:
    if terms.no_support == terms.rows:
        return "no position has a support outside its top ids"
    return "it is infinite or not a number at every position"


def _sampled_estimators(pair: AlignedPair, grouped: Grouped) -> list[Metric]:
    reason = why_not_sampled(pair)
    if reason is not None:
        return [absent(name, reason) for name in ("kl.k1", "kl.k2", "kl.k3")]
    tokens = grouped(pair.finite)
    delta = pair.finite_values(pair.delta)
    note = "is KL if the tokens were sampled at temperature 1 without top-p or top-k"
    if not pair.distribution.is_raw:
        note = f"is KL if the tokens were sampled at {pair.distribution}"
    return [
        metric("kl.k1", tokens.mean(-delta), note=note),
        metric("kl.k2", tokens.mean(delta**2 / 2), note=note),
        metric("kl.k3", tokens.mean(np.expm1(delta) - delta), note=note),
    ]


def why_not_sampled(pair: AlignedPair) -> str | None:
    """Why the tokens are no sample of the baseline A; None if they are one.

    k1, k2, k3 and importance ratios say something of A and B only on such tokens.
    """
    if "greedy" in pair.sources:
        return "a greedy trace is no sample, so they say nothing about KL(A || B) on it"
    samplers = {_SAMPLED_BY.get(source) for source in pair.sources}
    if samplers != {pair.baseline_name}:
        return f"the tokens were not sampled from {pair.baseline_name}"
    temperature = pair.trace.temperature
    if "sampled" not in pair.sources:
        return None
    # The record samples without top-k and top-p: it is the temperature that must be the same.
    if temperature != pair.distribution.temperature:
        wanted = f"{pair.distribution.temperature:g}"
        return f"the tokens were sampled at temperature {temperature}, not {wanted}"
    if pair.distribution.is_filtered:
        return f"the tokens were not sampled with {pair.distribution}"
    return None
