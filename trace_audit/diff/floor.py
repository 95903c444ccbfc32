"""The noise floor: what a metric is between repeats of one configuration.

A run's family is the run and its repeats (`repeat_of` in run.json). Two kinds of repeat: ``rerun``
(same schedule, fresh process) and ``batch`` (other order and mates). The floor of a metric is its
mean point value over the pairs of a kind; of both sides and kinds the larger one counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import numpy as np

from trace_audit.diff import identity
from trace_audit.diff.align import reduced
from trace_audit.diff.bootstrap import Resampler
from trace_audit.diff.catalog import CATALOG
from trace_audit.diff.flips import top_changes
from trace_audit.diff.metric import Floor, FloorKind, Interval, Metric
from trace_audit.diff.metrics import MetricTable
from trace_audit.diff.source import AuditSource
from trace_audit.diff.verdict import FloorSummary
from trace_audit.errors import InvalidComparisonError

# Up to this many runs every pair is compared; of more, each run with the next one.
_ALL_PAIRS_OF = 6
_GAP_QUANTILE = 0.99
_KINDS: tuple[FloorKind, ...] = ("rerun", "batch")


@dataclass(frozen=True, kw_only=True)
class _PairFloor:
    """One pair of repeats: metric -> (distance from "nothing differs", interval)."""

    distances: dict[str, tuple[float, Interval | None]]
    bitwise: bool
    unequal_share: float | None
    gap_change: float | None


@dataclass(frozen=True, kw_only=True)
class MeasuredFloor:
    """The floor of one family and kind.

    Attributes:
        values: Floor of each metric that the pairs have.
        gap_change: p99 of the change of the best two tokens' gap, nats; None where unknown.
    """

    summary: FloorSummary
    values: dict[str, Floor]
    gap_change: float | None


class FloorBook:
    """Measures floors from stored repeats, each pair of runs once."""

    def __init__(self, source: AuditSource) -> None:
        """Reads from an audit, when asked."""
        self._source = source
        self._pairs: dict[tuple[str, str], _PairFloor | InvalidComparisonError] = {}

    def floors(self, baseline: str, candidate: str) -> list[MeasuredFloor]:
        """Floors of both sides; the compared pair itself is never its own floor."""
        found = []
        for root in dict.fromkeys((self._root(baseline), self._root(candidate))):
            for kind in _KINDS:
                floor = self._measure(root, kind, frozenset((baseline, candidate)))
                if floor is not None:
                    found.append(floor)
        return found

    def _root(self, run: str) -> str:
        repeated = self._source.info(run).get("repeat_of")
        return run if repeated is None else str(repeated)

    def _measure(
        self, root: str, kind: FloorKind, compared: frozenset[str]
    ) -> MeasuredFloor | None:
        family, left_out = self._family(root, kind)
        chosen = combinations(family, 2) if len(family) <= _ALL_PAIRS_OF else pairwise(family)
        pairs = []
        for a, b in chosen:
            if {a, b} == compared:
                continue
            measured = self._pair(a, b)
            if isinstance(measured, InvalidComparisonError):
                left_out.append(f"{b}: {measured.message}")
            else:
                pairs.append(measured)
        if not pairs and not left_out:
            return None
        return _measured(root, kind, family, pairs, left_out)

    def _family(self, root: str, kind: FloorKind) -> tuple[list[str], list[str]]:
        """Runs that repeat each other, and runs that only say so with the reason."""
        names = self._source.audit.run_names()
        family = [root] if root in names else []
        left_out = []
        for name in names:
            info = self._source.info(name)
            if info.get("repeat_of") != root or (info.get("repeat_kind") or "rerun") != kind:
                continue
            reason = None
            if family:
                reason = identity.why_no_repeat(self._source.info(family[0]), info, kind)
            if reason is None:
                family.append(name)
            else:
                left_out.append(f"{name}: {reason}")
        return family, left_out

    def _pair(self, a: str, b: str) -> _PairFloor | InvalidComparisonError:
        if (a, b) not in self._pairs:
            try:
                self._pairs[a, b] = self._compared(a, b)
            except InvalidComparisonError as error:
                self._pairs[a, b] = error
        return self._pairs[a, b]

    def _compared(self, a: str, b: str) -> _PairFloor:
        source = self._source
        pair = reduced(source.pair_rows(a, b))
        unequal = pair.unequal
        share = None if unequal is None else float(unequal.mean())
        if share == 0.0:
            compared = [name for name, info in CATALOG.items() if info.neutral is not None]
            nothing: dict[str, tuple[float, Interval | None]] = dict.fromkeys(compared, (0.0, None))
            return _PairFloor(distances=nothing, bitwise=True, unequal_share=0.0, gap_change=0.0)
        changes = top_changes(pair)
        table = MetricTable(pair, Resampler(len(pair.group_ids)))
        metrics = table.metrics(changes, excess_refused=source.excess_refused(a, b))
        gaps = None if changes is None else changes.gap_change
        return _PairFloor(
            distances=dict(_distances(metrics)),
            bitwise=False,
            unequal_share=share,
            gap_change=None if gaps is None or not len(gaps) else _p99(gaps),
        )


def with_floors(metrics: Iterable[Metric], floors: Sequence[MeasuredFloor]) -> tuple[Metric, ...]:
    """The metrics, each with the largest of its floors."""
    return tuple(_with_floor(metric, floors) for metric in metrics)


def gap_change_floor(floors: Iterable[MeasuredFloor]) -> float:
    """Largest p99 of the gap's change between repeats, nats; 0 without repeats."""
    return max((floor.gap_change for floor in floors if floor.gap_change is not None), default=0.0)


def _with_floor(metric: Metric, floors: Sequence[MeasuredFloor]) -> Metric:
    neutral = CATALOG[metric.name].neutral
    found = [floor.values[metric.name] for floor in floors if metric.name in floor.values]
    if neutral is None or not found:
        return metric
    floor = max(found, key=lambda one: abs(one.value - neutral))
    size = abs(floor.value - neutral)
    if metric.value is not None and size > 0:
        floor = replace(floor, ratio=abs(metric.value - neutral) / size)
    return replace(metric, floor=floor)


def _distances(metrics: Iterable[Metric]) -> Iterable[tuple[str, tuple[float, Interval | None]]]:
    for metric in metrics:
        info = CATALOG[metric.name]
        if metric.value is None or info.neutral is None:
            continue
        neutral, bounds = info.neutral, metric.interval
        if bounds is not None:
            bounds = replace(bounds, low=bounds.low - neutral, high=bounds.high - neutral)
        distance = metric.value - neutral
        yield metric.name, (abs(distance) if info.signed else distance, bounds)


def _measured(
    root: str,
    kind: FloorKind,
    family: Sequence[str],
    pairs: Sequence[_PairFloor],
    left_out: Sequence[str],
) -> MeasuredFloor:
    shares = [pair.unequal_share for pair in pairs if pair.unequal_share is not None]
    gaps = [pair.gap_change for pair in pairs if pair.gap_change is not None]
    summary = FloorSummary(
        run=root,
        kind=kind,
        runs=tuple(family),
        pairs=len(pairs),
        bitwise=bool(pairs) and all(pair.bitwise for pair in pairs),
        unequal_share=max(shares, default=None),
        left_out=tuple(left_out),
    )
    values = {}
    for name in CATALOG:
        found = [pair.distances[name] for pair in pairs if name in pair.distances]
        # A pair that lacks the metric leaves the mean open, so there is no floor of it then.
        if found and len(found) == len(pairs):
            values[name] = _floor(name, kind, root, found)
    gap = float(np.mean(gaps)) if gaps else None
    return MeasuredFloor(summary=summary, values=values, gap_change=gap)


def _floor(
    name: str, kind: FloorKind, root: str, found: Sequence[tuple[float, Interval | None]]
) -> Floor:
    neutral = CATALOG[name].neutral
    assert neutral is not None
    bounds = [interval for _, interval in found if interval is not None]
    interval = None
    if bounds:
        interval = Interval(
            low=neutral + float(np.mean([bound.low for bound in bounds])),
            high=neutral + float(np.mean([bound.high for bound in bounds])),
            method=bounds[0].method,
        )
    value = neutral + float(np.mean([distance for distance, _ in found]))
    return Floor(value=value, interval=interval, kind=kind, run=root, pairs=len(found))


def _p99(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    return float(np.quantile(values, _GAP_QUANTILE))
