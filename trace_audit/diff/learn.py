"""Bounds from runs that are known to be good."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import ROUND_CEILING, Decimal

import numpy as np

from trace_audit.diff.catalog import CATALOG
from trace_audit.diff.intervals import CONFIDENCE
from trace_audit.diff.profiles import PROFILE_FLOOR_FACTOR
from trace_audit.diff.special import t_quantile
from trace_audit.diff.summary import PairSummary
from trace_audit.diff.verdict import Gate

MIN_RUNS = 2
LEARNED = (
    "kl.mean",
    "kl.excess",
    "abs.mean",
    "abs.p99",
    "tme",
    "top1.disagreement",
    "flip.hard",
)


def distinct_runs(pairs: Sequence[PairSummary]) -> tuple[list[PairSummary], dict[str, str]]:
    """Runs that differ in a number from every one before them.

    Runs that are equal bit for bit are one run, however many keys lie between them.

    Returns:
        The others left out, and of each of those the first that it equals, by name.
    """
    first: dict[tuple[float | None, ...], str] = {}
    kept, same = [], {}
    for pair in pairs:
        found = [pair.metric(name) for name in LEARNED]
        key = tuple(None if metric is None else metric.value for metric in found)
        name = pair.candidate.name
        if first.setdefault(key, name) == name:
            kept.append(pair)
        else:
            same[name] = first[key]
    return kept, same


def learned_gates(
    pairs: Sequence[PairSummary], metrics: Sequence[str]
) -> tuple[tuple[Gate, ...], dict[str, str]]:
    """A gate a metric that good runs would pass.

    A gate passes where the upper bound of the interval is under it, so it is upper bounds that are
    learned: the bound is the larger of the largest one and the upper end of their 95 % prediction
    interval for one more run, rounded up to three digits.

    Args:
        pairs: Good runs against one baseline, at least two.
        metrics: Names that may be gated.

    Returns:
        The gates, and for each metric that gives none the reason.
    """
    gates, missing = [], {}
    for name in metrics:
        reasons = [reason for pair in pairs if (reason := _why_not(pair, name)) is not None]
        if reasons:
            missing[name] = reasons[0]
            continue
        uppers = [_upper(pair, name) for pair in pairs]
        predicted = prediction_bound(uppers)
        source = (
            f"{len(uppers)} good runs: largest upper bound {max(uppers):.3g}, "
            f"one more is expected under {predicted:.3g}"
        )
        gates.append(
            Gate(
                metric=name,
                bound=rounded_up(max(*uppers, predicted)),
                floor_factor=PROFILE_FLOOR_FACTOR,
                source=source,
            )
        )
    return tuple(gates), missing


def prediction_bound(values: Sequence[float]) -> float:
    """Upper end of the 95 % prediction interval of one more value: mean + t sd sqrt(1 + 1/N)."""
    size = len(values)
    spread = float(np.std(values, ddof=1)) * math.sqrt(1 + 1 / size)
    return float(np.mean(values)) + t_quantile(0.5 + CONFIDENCE / 2, size - 1) * spread


def rounded_up(value: float) -> float:
    """The smallest number of three significant digits that is not under a non-negative value."""
    if value == 0:
        return 0.0
    exact = Decimal(value)
    unit = Decimal(1).scaleb(exact.adjusted() - 2)
    return float(exact.quantize(unit, rounding=ROUND_CEILING))


def _why_not(pair: PairSummary, name: str) -> str | None:
    metric = pair.metric(name)
    if metric is None:
        return None  # A bitwise pair: nothing differs.
    where = pair.candidate.name
    if metric.value is None or metric.not_gated is not None:
        return f"{where}: {metric.not_gated or metric.note}"
    if metric.unbounded:
        return f"{where}: infinite or not a number at {metric.unbounded:,} tokens"
    if metric.interval is None or not math.isfinite(metric.interval.high):
        return f"{where}: too few sequences for an upper bound"
    return None


def _upper(pair: PairSummary, name: str) -> float:
    metric = pair.metric(name)
    if metric is None or metric.interval is None:
        return CATALOG[name].neutral or 0.0
    return metric.interval.high
