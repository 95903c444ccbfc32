"""Decides: each gated metric's interval against its threshold, and all of them together.

All gates are on lower-is-better forms. An upper bound at or under the threshold passes, a lower
bound over it fails, and anything else is inconclusive (docs/metrics.md, "Gates").
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from trace_audit.diff.catalog import CATALOG
from trace_audit.diff.decide import groups_to_decide
from trace_audit.diff.metric import Floor, Interval, Metric
from trace_audit.diff.quantiles import groups_for_upper_bound
from trace_audit.diff.summary import PairSummary, ReportSummary
from trace_audit.diff.verdict import (
    EXIT_CODES,
    PRECEDENCE,
    Gate,
    GateResult,
    Gating,
    Outcome,
    PassKind,
    Verdict,
)

_FORMAT_KEYS = ("engine.kv_cache_dtype", "engine.quantization", "engine.dtype")
NO_FLOOR = "no floor was measured"


def judge(pair: PairSummary, gating: Gating) -> Verdict:
    """The verdict on one pair."""
    results = tuple(_result(pair, gate, gating) for gate in gating.gates)
    gated = [result for result in results if not result.gate.watch]
    outcomes: list[Outcome] = [result.outcome for result in gated]
    reason = None
    if pair.non_finite:
        outcomes.append("fail")
        reason = "the candidate has non-finite logprobs where the baseline has none"
    elif pair.fault:
        outcomes.append("fail")
        reason = "nothing between the two runs may change a bit, and rows differ"
    if pair.not_gated is not None:
        outcomes.append("invalid")
        reason = pair.not_gated
    outcome = worst(outcomes)
    passed = _pass_kind(pair, gated) if outcome == "pass" else None
    return Verdict(outcome=outcome, passed=passed, results=results, reason=reason)


def exit_code(summary: ReportSummary) -> int:
    """What the command ends with: 4, 1, 3 or 0, the first that a candidate calls for."""
    if summary.gating is None:
        return EXIT_CODES["invalid" if summary.invalid else "pass"]
    outcomes: list[Outcome] = ["invalid"] * bool(summary.invalid)
    for pair in summary.pairs:
        if pair.verdict is not None:
            undecided = pair.verdict.outcome == "inconclusive"
            outcomes.append(summary.gating.inconclusive if undecided else pair.verdict.outcome)
    return EXIT_CODES[worst(outcomes)]


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """The outcome that counts, by precedence; nothing at all is no pass."""
    return min(outcomes, key=PRECEDENCE.index, default="invalid")


def _pass_kind(pair: PairSummary, gated: Iterable[GateResult]) -> PassKind:
    if pair.bitwise:
        return "BITWISE"
    return "WITHIN-FLOOR" if all(result.within_floor for result in gated) else "WITHIN-BOUND"


def _result(pair: PairSummary, gate: Gate, gating: Gating) -> GateResult:
    info = CATALOG[gate.metric]
    metric = pair.metric(gate.metric)
    floor = None if metric is None else metric.floor
    bound = _bound(pair, gate)
    result = GateResult(
        gate=gate,
        outcome="pass",
        unit=info.unit,
        value=info.neutral if metric is None else metric.value,
        interval=None if metric is None else metric.interval,
        bound=bound,
        threshold=_threshold(gate, bound, floor),
        floor=floor,
        floor_over_bound=floor is not None and bound is not None and floor.value > bound,
        census=gate.metric == "rows.unequal" and bound == 0,
    )
    measured = any(one.pairs for one in pair.floors) if pair.bitwise else floor is not None
    if gating.requires_floor and not measured:
        return replace(result, outcome="invalid", reason=f"{NO_FLOOR}, and one is required")
    if metric is None and not pair.bitwise:
        return replace(result, outcome="invalid", reason="neither run's model has a router")
    if metric is None:
        # A bitwise pair has no table: nothing differs, whatever was to be measured.
        return replace(result, passing_bound=info.neutral)
    return _held(pair, metric, result)


def _held(pair: PairSummary, metric: Metric, result: GateResult) -> GateResult:
    """The result with its outcome, for a pair that has a table."""
    if pair.non_finite == pair.tokens:
        return replace(result, outcome="fail", reason=metric.note)
    if metric.value is None or metric.not_gated is not None:
        return replace(result, outcome="invalid", reason=metric.not_gated or metric.note)
    if result.threshold is None:
        return replace(result, outcome="invalid", reason=NO_FLOOR)
    if metric.unbounded:
        reason = f"infinite or not a number at {metric.unbounded:,} tokens"
        return replace(result, outcome="fail", reason=reason)
    if result.census:
        outcome: Outcome = "fail" if metric.value > result.threshold else "pass"
        return replace(result, outcome=outcome, passing_bound=metric.value)
    if metric.interval is None:
        reason = "one group gives no interval; at least two are needed"
        return replace(result, outcome="inconclusive", reason=reason)
    return _by_interval(pair, metric, result, result.threshold)


def _by_interval(
    pair: PairSummary, metric: Metric, result: GateResult, threshold: float
) -> GateResult:
    assert metric.value is not None
    assert metric.interval is not None
    high = metric.interval.high
    result = replace(result, passing_bound=high if math.isfinite(high) else None)
    if high <= threshold:
        limit = _floor_limit(result.gate, result.floor)
        return replace(result, within_floor=limit is not None and high <= limit)
    if metric.interval.low > threshold:
        return replace(result, outcome="fail")
    groups = _groups_needed(pair, metric, metric.interval, threshold)
    needed = None if groups is None else math.ceil(groups * pair.sequences / pair.groups)
    return replace(result, outcome="inconclusive", sequences_needed=needed)


def _groups_needed(
    pair: PairSummary, metric: Metric, interval: Interval, threshold: float
) -> int | None:
    assert metric.value is not None
    level, effective_n = CATALOG[metric.name].level, metric.effective_n
    if math.isinf(interval.high) and level is not None and effective_n is not None:
        return groups_for_upper_bound(level, effective_n, pair.tokens, pair.groups)
    return groups_to_decide(metric.value, interval, threshold, pair.groups, effective_n)


def _bound(pair: PairSummary, gate: Gate) -> float | None:
    if gate.fp8_bound is None:
        return gate.bound
    runs = (pair.baseline, pair.candidate)
    formats = [str(run.resolved.get(key)) for run in runs for key in _FORMAT_KEYS]
    return gate.fp8_bound if any(name.startswith("fp8") for name in formats) else gate.bound


def _floor_limit(gate: Gate, floor: Floor | None) -> float | None:
    """So many floors away from "nothing differs"; None without a floor or a part for it."""
    neutral = CATALOG[gate.metric].neutral
    if floor is None or neutral is None or not gate.floor_factor:
        return None
    return neutral + gate.floor_factor * (floor.value - neutral)


def _threshold(gate: Gate, bound: float | None, floor: Floor | None) -> float | None:
    limits = [limit for limit in (bound, _floor_limit(gate, floor)) if limit is not None]
    return max(limits, default=None)
