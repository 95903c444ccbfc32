"""Every metric's definition by its stable name, in the order of the report's table."""

from __future__ import annotations

import difflib
from dataclasses import replace

from trace_audit.diff.catalog_distribution import DISTRIBUTION
from trace_audit.diff.catalog_forced import FORCED
from trace_audit.diff.catalog_rl import RL
from trace_audit.diff.catalog_router import ROUTER
from trace_audit.diff.estimators import Estimate
from trace_audit.diff.intervals import clipped
from trace_audit.diff.metric import Metric
from trace_audit.diff.metric_info import MetricInfo
from trace_audit.errors import UsageError

CATALOG: dict[str, MetricInfo] = {**FORCED, **DISTRIBUTION, **ROUTER, **RL}


def metric_info(name: str) -> MetricInfo:
    """The definition of a metric.

    Raises:
        UsageError: There is no such metric; the hint names the nearest.
    """
    if name not in CATALOG:
        near = difflib.get_close_matches(name, CATALOG, n=1, cutoff=0.5)
        raise UsageError(
            f"There is no metric {name!r}.",
            hint=f"Did you mean {near[0]!r}?" if near else "trace-audit explain lists them.",
        )
    return CATALOG[name]


def metric(name: str, estimate: Estimate, *, note: str | None = None) -> Metric:
    """A metric with its value; the interval is kept inside what the metric can be."""
    info = CATALOG[name]
    return Metric(
        name=name,
        label=info.label,
        section=info.section,
        unit=info.unit,
        value=estimate.value,
        interval=clipped(estimate.interval, info.minimum),
        effective_n=estimate.effective_n,
        detectable=estimate.detectable,
        note=note,
    )


def absent(name: str, reason: str) -> Metric:
    """The metric as "n/a" with its reason."""
    info = CATALOG[name]
    return Metric(
        name=name, label=info.label, section=info.section, unit=info.unit, value=None, note=reason
    )


def as_lower_bound(metric: Metric, reason: str) -> Metric:
    """The metric marked as a lower bound, to be read as ">="."""
    return replace(metric, at_least=True, note=reason, not_gated=f"only a lower bound: {reason}")
