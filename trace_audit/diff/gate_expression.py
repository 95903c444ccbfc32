"""`--fail-on` expressions: ``METRIC > NUMBER``, with ``%`` for shares, or ``METRIC > N*floor``."""

from __future__ import annotations

import difflib
import math
import re

from trace_audit.diff.catalog import metric_info
from trace_audit.diff.metric_info import MetricInfo
from trace_audit.diff.verdict import Gate
from trace_audit.errors import UsageError

_SHAPE = re.compile(r"([^\s<>=!]+)\s*([<>=!]+)\s*(.+)")
_NUMBER = re.compile(r"([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*(.*)")
_UNITS = {"%": "%", "nats": "nats", "*floor": "*floor"}
_EXAMPLES = "for example 'kl.mean > 3e-3', 'flip.hard > 0.1%' or 'abs.p99 > 3*floor'"


def parse_gate(text: str) -> Gate:
    """Reads one expression; nothing in it is evaluated.

    Raises:
        UsageError: It is no such expression, or names an unknown metric, an unknown unit, a unit
            that is not the metric's, or a metric that no gate may name.
    """
    match = _SHAPE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--fail-on {text!r} is no gate.", hint=f"Write one {_EXAMPLES}.")
    name, comparison, limit = match.groups()
    info = gated_metric(name)
    if comparison != ">":
        raise UsageError(
            f"--fail-on {text!r} compares with {comparison!r}.",
            hint="Gates fail on what is over a bound: use '>'.",
        )
    number = _NUMBER.fullmatch(limit)
    if number is None:
        raise UsageError(
            f"--fail-on {text!r}: {limit!r} is no number.", hint=f"Write one {_EXAMPLES}."
        )
    value, unit = float(number[1]), re.sub(r"\s+", "", number[2])
    if not math.isfinite(value):
        raise UsageError(f"--fail-on {text!r}: {number[1]} is no finite number.")
    if unit == "*floor":
        return Gate(metric=name, bound=None, floor_factor=value, source="--fail-on")
    return Gate(metric=name, bound=_bound(text, info, value, unit), source="--fail-on")


def gated_metric(name: str) -> MetricInfo:
    """The definition of a metric that a gate may name.

    Raises:
        UsageError: It is unknown, or a gate on it would mean nothing.
    """
    info = metric_info(name)
    if info.not_gated is not None:
        reason, _, instead = info.not_gated.partition("; ")
        raise UsageError(
            f"{name} cannot be gated: {reason}.",
            hint=f"{instead[:1].upper()}{instead[1:]}." if instead else None,
        )
    return info


def _bound(text: str, info: MetricInfo, value: float, unit: str) -> float:
    if unit not in ("", *_UNITS):
        near = difflib.get_close_matches(unit, _UNITS, n=1, cutoff=0.5)
        raise UsageError(
            f"--fail-on {text!r}: {unit!r} is no unit.",
            hint=f"Did you mean {near[0]!r}?" if near else "Units are %, nats and *floor.",
        )
    if (unit == "%" and info.unit != "share") or (unit == "nats" and info.unit != "nats"):
        raise UsageError(
            f"--fail-on {text!r}: the metric is in {info.unit}, not in {unit}.",
            hint="Leave out the unit.",
        )
    return value / 100 if unit == "%" else value
