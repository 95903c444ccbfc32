"""KL rows of the metric table, and the rules on when each may be printed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from trace_audit.diff.align import AlignedPair
from trace_audit.diff.catalog import absent, as_lower_bound, metric
from trace_audit.diff.columns import RunColumns
from trace_audit.diff.estimators import GroupedTokens
from trace_audit.diff.kl import KLTerms, fixed_support, fixed_support_kl
from trace_audit.diff.summary import KLCoverage, Metric

Grouped = Callable[[NDArray[np.bool_]], GroupedTokens]

MAX_HEAVY_SHARE = 0.05
_SAMPLED_BY = {"sampled": "record", "imported": "imported"}


def pair_kl(pair: AlignedPair) -> tuple[KLTerms | None, KLTerms | None]:
    """KL(baseline || candidate) and KL(candidate || baseline) per row, where they can be had."""
    a, b = fixed_support(pair.baseline), fixed_support(pair.candidate)
    record = fixed_support(pair.record)
    if a is None or b is None or record is None:
        return None, None
    ids = pair.support_token_ids
    return fixed_support_kl(a, b, record, ids), fixed_support_kl(b, a, record, ids)


def kl_metrics(
    pair: AlignedPair,
    grouped: Grouped,
    kl: KLTerms | None,
    reverse: KLTerms | None,
    *,
    excess_refused: str | None,
) -> list[Metric]:
    """The section "kl" of the table.

    Args:
        pair: The aligned runs.
        grouped: Groups of some of its rows.
        kl: KL(baseline || candidate) of each row, where it can be had.
        reverse: KL(candidate || baseline) of each row.
        excess_refused: Why `kl.excess` has no meaning here; None if it has one.
    """
    faults = 0 if kl is None else candidate_faults(pair.baseline, kl)
    return [
        *_direction(grouped, kl, "kl.mean", "kl.lower", faults),
        *_direction(grouped, reverse, "kl.reverse", "kl.reverse_lower", faults),
        _excess(pair, grouped, excess_refused),
        *_sampled_estimators(pair, grouped),
    ]


def kl_coverage(kl: KLTerms | None, reverse: KLTerms | None) -> KLCoverage | None:
    """How many rows the forward KL used and left out."""
    if kl is None or reverse is None:
        return None
    return KLCoverage(
        used=int(kl.usable.sum()),
        no_support=int(kl.no_support.sum()),
        non_finite=int(kl.non_finite.sum()),
        infinite=int(kl.infinite.sum()),
        heavy_tail_share=heavy_tail_share(reverse),
    )


def heavy_tail_share(terms: KLTerms) -> float | None:
    """Part of a KL sum on rows where X's tail mass is over four times the record run's."""
    estimate = terms.estimate[terms.usable]
    total = float(estimate.sum())
    if not total > 0:
        return None
    return float(estimate[terms.heavy_tail[terms.usable]].sum()) / total


def candidate_faults(baseline: RunColumns, kl: KLTerms) -> int:
    """Rows where KL(baseline || candidate) is infinite, or no number by the candidate's doing."""
    support, tail = baseline.support_logprobs, baseline.log_tail_mass
    assert support is not None
    assert tail is not None
    sound = ~(np.isnan(support).any(axis=1) | np.isnan(tail))
    return int((kl.infinite | (kl.non_finite & sound)).sum())


def _excess(pair: AlignedPair, grouped: Grouped, refused: str | None) -> Metric:
    """KL(record || candidate) over KL(record || baseline), on the rows that have both."""
    if refused is not None:
        return absent("kl.excess", refused)
    a, b = fixed_support(pair.baseline), fixed_support(pair.candidate)
    record = fixed_support(pair.record)
    if a is None or b is None or record is None or pair.record is None:
        return absent("kl.excess", "a run has no logprobs at the fixed support")
    ids = pair.support_token_ids
    near, far = (fixed_support_kl(record, side, record, ids) for side in (a, b))
    used = near.usable & far.usable
    if not near.estimate[used].sum() > 0:
        return absent("kl.excess", f"{pair.baseline_name} equals the record; gate on kl.mean")
    excess = metric("kl.excess", grouped(used).ratio(far.estimate[used], near.estimate[used]))
    return replace(excess, unbounded=candidate_faults(pair.record, far))


def _direction(
    grouped: Grouped, terms: KLTerms | None, name: str, bound: str, faults: int
) -> list[Metric]:
    if terms is None:
        reason = "a run has no logprobs at the fixed support"
        return [absent(name, reason), absent(bound, reason)]
    if not terms.usable.any():
        reason = _why_unusable(terms)
        return [absent(name, reason), absent(bound, reason)]
    tokens = grouped(terms.usable)
    lower = metric(bound, tokens.mean(terms.lower_bound[terms.usable]))
    share = heavy_tail_share(terms)
    if share is not None and share > MAX_HEAVY_SHARE:
        # Few draws then stand for a tail they were not drawn from; only the bound is sound.
        note = f"{share:.0%} of the estimate comes from tails over 4 times the record run's"
        estimate = tokens.mean(terms.lower_bound[terms.usable])
        return [as_lower_bound(metric(name, estimate), note), lower]
    infinite = int(terms.infinite.sum())
    note_infinite = f"infinite at {infinite} tokens, which are left out" if infinite else None
    value = metric(name, tokens.mean(terms.estimate[terms.usable]), note=note_infinite)
    return [replace(value, unbounded=faults), lower]


def _why_unusable(terms: KLTerms) -> str:
    if terms.no_support.all():
        return "no position has a support outside its top ids"
    return "it is infinite or not a number at every position"


def _sampled_estimators(pair: AlignedPair, grouped: Grouped) -> list[Metric]:
    reason = why_not_sampled(pair)
    if reason is not None:
        return [absent(name, reason) for name in ("kl.k1", "kl.k2", "kl.k3")]
    tokens = grouped(pair.finite)
    delta = pair.delta[pair.finite]
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
