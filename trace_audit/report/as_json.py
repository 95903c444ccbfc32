"""A summary as strict JSON: non-finite numbers are strings, never NaN literals."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from trace_audit.diff.summary import PairSummary, ReportSummary

_CONVENTIONS = {
    "delta": "candidate minus baseline log-probability of the forced token, in nats",
    "non_finite": "written as the strings NaN, Infinity and -Infinity",
    "null": "not available; see the note",
}


def render_json(summary: ReportSummary) -> str:
    """The whole report as one JSON object, with a final newline."""
    # ASCII only: ids may hold lone surrogates, which are not valid UTF-8.
    document = {"conventions": _CONVENTIONS, **_plain(summary)}
    return json.dumps(document, allow_nan=False, indent=2) + "\n"


def render_pair_json(summary: ReportSummary, pair: PairSummary) -> str:
    """The report narrowed to one pair."""
    return render_json(replace(summary, pairs=(pair,), invalid=(), next_commands=()))


def _plain(value: object) -> Any:
    if isinstance(value, PairSummary):
        return {**_fields(value), "fault": value.fault}
    if is_dataclass(value):
        return _fields(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
