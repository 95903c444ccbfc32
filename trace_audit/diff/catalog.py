"""Every metric's stable name, label, section and unit, in the order of the report's table."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trace_audit.diff.estimators import Estimate
from trace_audit.diff.intervals import clipped
from trace_audit.diff.summary import Metric, MetricSection


@dataclass(frozen=True, kw_only=True)
class MetricInfo:
    """What is fixed about a metric: its words and the smallest value it can take."""

    label: str
    section: MetricSection
    unit: str
    minimum: float = float("-inf")


def _info(label: str, section: MetricSection, unit: str, minimum: float = 0.0) -> MetricInfo:
    return MetricInfo(label=label, section=section, unit=unit, minimum=minimum)


_ANY = float("-inf")

CATALOG: dict[str, MetricInfo] = {
    "delta.mean": _info("bias: mean delta", "logprob", "nats", _ANY),
    "abs.mean": _info("mean |delta|", "logprob", "nats"),
    "delta.rms": _info("RMS delta", "logprob", "nats"),
    "abs.p50": _info("|delta| median", "logprob", "nats"),
    "abs.p90": _info("|delta| p90", "logprob", "nats"),
    "abs.p99": _info("|delta| p99", "logprob", "nats"),
    "abs.p99_9": _info("|delta| p99.9", "logprob", "nats"),
    "abs.max": _info("|delta| max", "logprob", "nats"),
    "delta.equal": _info("delta exactly 0", "logprob", "share"),
    "rows.unequal": _info("logits not bit-equal", "logprob", "share"),
    "tme": _info("TME: mean exp|delta|", "probability", "ratio", 1.0),
    "ratio.outside": _info("exp(delta) outside 0.9-1.1", "probability", "share"),
    "dp.rms": _info("RMS dp", "probability", "prob"),
    "dp.p50": _info("|dp| median", "probability", "prob"),
    "dp.p99": _info("|dp| p99", "probability", "prob"),
    "ppl.baseline": _info("perplexity, baseline", "probability", "ppl", 1.0),
    "ppl.candidate": _info("perplexity, candidate", "probability", "ppl", 1.0),
    "ppl.ratio": _info("perplexity ratio", "probability", "ratio"),
    "kl.mean": _info("KL(baseline||candidate)", "kl", "nats"),
    "kl.lower": _info("  lower bound", "kl", "nats"),
    "kl.reverse": _info("KL(candidate||baseline)", "kl", "nats"),
    "kl.reverse_lower": _info("  lower bound", "kl", "nats"),
    "kl.k1": _info("k1 = mean -delta", "kl", "nats", _ANY),
    "kl.k3": _info("k3", "kl", "nats"),
    "lse.drift": _info("logsumexp drift", "distribution", "nats", _ANY),
    "entropy.drift": _info("entropy drift", "distribution", "nats", _ANY),
    "rank.changed": _info("forced token's rank changed", "distribution", "share"),
    "ties.baseline": _info("forced token tied, baseline", "distribution", "share"),
    "ties.candidate": _info("forced token tied, candidate", "distribution", "share"),
    "top1.disagreement": _info("best token differs", "top1", "share"),
    "flip.all": _info("flips", "top1", "share"),
    "flip.hard": _info("hard flips", "top1", "share"),
    "flip.tie": _info("tie changes", "top1", "share"),
    "flip.near_tie": _info("near ties", "top1", "share"),
    "flip.excess": _info("flips / expected", "top1", "factor"),
}


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
    return replace(metric, at_least=True, note=reason)
