"""What is fixed about a metric: its words, its formula, and what it can be used for."""

from __future__ import annotations

from dataclasses import dataclass

from trace_audit.diff.metric import MetricSection

SIGNED = "its sign has no better side"
SAMPLED = (
    "tokens sampled from the distribution that the baseline scored (raw: temperature 1, without "
    "top-p or top-k)"
)


@dataclass(frozen=True, kw_only=True)
class MetricInfo:
    """The definition of a metric; docs/metrics.md, `explain` and the reports are made of these.

    Attributes:
        label: Its name in a table.
        unit: As in :class:`trace_audit.diff.metric.Metric`.
        formula: In the notation of docs/metrics.md.
        reads: What a reader should make of it.
        valid: When it may be believed.
        source: Module that computes it.
        minimum: Smallest value it can take.
        neutral: Its value where nothing differs; None for a property of one run.
        signed: Distances from ``neutral`` count on both sides.
        level: Of a quantile, in (0, 1); None for what is none.
        not_gated: Why no gate may name it, with what to gate on; None if one may.
    """

    label: str
    section: MetricSection
    unit: str
    formula: str
    reads: str = ""
    valid: str = "always"
    source: str
    minimum: float = 0.0
    neutral: float | None = 0.0
    signed: bool = False
    level: float | None = None
    not_gated: str | None = None
