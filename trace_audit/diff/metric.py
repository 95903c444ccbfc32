"""One number of a comparison: its value, its interval, its noise floor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MetricSection = Literal["logprob", "probability", "distribution", "kl", "top1", "router", "rl"]
FloorKind = Literal["rerun", "batch"]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A 95 % confidence interval in the unit of its metric.

    Attributes:
        method: ``t``, ``bootstrap``, ``clopper-pearson``, ``rule of three`` or ``order statistics``
            (whose upper bound may be infinite).
    """

    low: float
    high: float
    method: str


@dataclass(frozen=True, kw_only=True)
class Floor:
    """What a metric is between repeats of one configuration, in the metric's own unit.

    Attributes:
        value: Mean point value over the pairs of repeats (of its size, for a signed metric).
        interval: Shown, and not used: the mean of the pairs' interval ends.
        kind: ``rerun`` (same schedule) or ``batch`` (other order and mates).
        run: The run whose repeats gave it: the noisier of the two sides.
        pairs: Pairs of repeats that were compared.
        ratio: Distance of the metric from "nothing differs" over that of the floor; None where
            the floor is exactly that.
    """

    value: float
    interval: Interval | None
    kind: FloorKind
    run: str
    pairs: int
    ratio: float | None = None


@dataclass(frozen=True, kw_only=True)
class Band:
    """What is normal: the metric's values in healthy changes of the same kind.

    Attributes:
        low, high: The smallest and the largest, in the metric's own unit.
        change: The kind of change, in words.
        source: Who measured it, on what.
    """

    low: float
    high: float
    change: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One number of a comparison.

    Attributes:
        name: Stable dotted name, as in docs/metrics.md.
        unit: ``nats``, ``share`` (of tokens, 0 to 1), ``prob``, ``ratio`` (near 1), ``ppl``
            (perplexity) or ``factor``.
        value: None when the metric cannot be had ("n/a"); never zero in that case.
        effective_n: Tokens over the design effect; None where it has no meaning.
        detectable: Smallest change of the value seen with 80 % power.
        at_least: The value is a lower bound, to be read as ">=".
        unbounded: Tokens that the candidate makes infinite or not a number; not in the value.
        not_gated: Why a gate on this value is refused; None if it is not.
        floor: Between repeats of one configuration; None if none was measured.
        band: What is normal for the change between the two runs; None where it is not known.
        note: The reason of an n/a, or a remark on the value.
    """

    name: str
    label: str
    section: MetricSection
    unit: str
    value: float | None
    interval: Interval | None = None
    effective_n: float | None = None
    detectable: float | None = None
    at_least: bool = False
    unbounded: int = 0
    not_gated: str | None = None
    floor: Floor | None = None
    band: Band | None = None
    note: str | None = None
