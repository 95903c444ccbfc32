"""What an HTML page says, as text in dataclasses: the template adds only markup.

Every string here is neutral (:func:`trace_audit.text.display_bytes`) but not escaped: that is the
template's work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from trace_audit.diff.exhibit import Exhibit
from trace_audit.diff.summary import Metric, PairSummary, ReportSummary
from trace_audit.diff.verdict import Gating
from trace_audit.report import gate_view, structure_view, view
from trace_audit.report.chart import Chart
from trace_audit.report.charts import confidence_chart, drift_chart, histogram_chart
from trace_audit.report.format import (
    NOT_AVAILABLE,
    count,
    interval,
    metric_value,
    number,
    plain,
    setting,
)
from trace_audit.report.html_tokens import SequenceView, TokenRow, sequence_view, token_row
from trace_audit.report.identity_view import IdentityRow, identity_rows
from trace_audit.report.router_view import router_chart, router_lines
from trace_audit.report.token_data import TokenData


@dataclass(frozen=True, kw_only=True)
class MetricRow:
    """One line of the metric table.

    Attributes:
        normal: What is normal, empty where it is not known.
        below: It belongs to the line above it.
        absent: The value is n/a, and the note says why.
    """

    label: str
    name: str
    value: str
    interval: str
    normal: str
    note: str
    below: bool
    absent: bool


@dataclass(frozen=True, kw_only=True)
class GridRow:
    """One candidate in the summary grid."""

    number: int
    name: str
    badge: str
    cells: tuple[str, ...]
    changed: str


@dataclass(frozen=True, kw_only=True)
class SettingRow:
    """A key and its value on both sides."""

    key: str
    baseline: str
    candidate: str
    differs: bool


@dataclass(frozen=True, kw_only=True)
class PairView:
    """The section of one candidate."""

    number: int
    name: str
    baseline: str
    badge: str
    bitwise: bool
    headline: str
    verdict: str
    gates: tuple[tuple[str, ...], ...]
    gate_lines: list[str]
    warnings: tuple[str, ...]
    identity: tuple[IdentityRow, ...]
    scope: tuple[str, ...]
    sections: tuple[tuple[str, tuple[MetricRow, ...]], ...]
    places: tuple[tuple[str, str], ...]
    charts: tuple[Chart, ...]
    confidence: Chart | None
    band_lines: tuple[str, ...]
    flip_line: str
    flips: tuple[TokenRow, ...]
    worst: tuple[TokenRow, ...]
    sequences: tuple[SequenceView, ...]
    left_out: int
    config: tuple[SettingRow, ...]
    environment: tuple[SettingRow, ...]


def grid_row(index: int, pair: PairSummary) -> GridRow:
    """A candidate's line in the grid: the numbers that decide which section to read."""
    values = [metric_value(pair.metric(name)) for name in ("abs.mean", "abs.max", "kl.mean")]
    if pair.bitwise:
        values = ["", "", ""]
    flips = pair.flips
    seconds = pair.candidate.engine_seconds
    cells = [
        *values,
        NOT_AVAILABLE if flips.reason is not None else count(flips.flips),
        count(flips.hard),
        "0" if pair.bitwise else metric_value(pair.metric("rows.unequal")),
        NOT_AVAILABLE if seconds is None else number(seconds),
    ]
    changed = (
        f"{plain(d.key)}: {setting(d.baseline)} \u2192 {setting(d.candidate)}"
        for d in pair.config_differences
    )
    return GridRow(
        number=index,
        name=plain(pair.candidate.name),
        badge=badge(pair),
        cells=tuple(cells),
        changed=", ".join(changed) or "nothing",
    )


def badge(pair: PairSummary) -> str:
    """A word or two on a pair: its verdict, or what was found where nothing was gated."""
    if pair.fault:
        return "FAULT"
    if pair.verdict is not None:
        return gate_view.verdict_word(pair)
    if pair.bitwise:
        return "BITWISE"
    return "NON-FINITE" if pair.non_finite else "DIFFERS"


def pair_view(
    index: int, pair: PairSummary, gating: Gating | None, exhibit: Exhibit, data: TokenData
) -> PairView:
    """A candidate's section; details of its tokens are added to ``data``.

    Args:
        index: Number of the pair in the report.
        pair: Its summary.
        gating: What was gated.
        exhibit: More of the same pair.
        data: Of the page.
    """
    sequences = tuple(sequence_view(index, sequence, data) for sequence in exhibit.sequences)
    shown = {t.key for sequence in sequences for t in sequence.tokens if t.key is not None}
    rows = [
        tuple(token_row(index, token, exhibit, data, shown) for token in tokens)
        for tokens in (pair.flips.examples, pair.worst)
    ]
    confidence = exhibit.confidence
    return PairView(
        number=index,
        name=plain(pair.candidate.name),
        baseline=plain(pair.baseline.name),
        badge=badge(pair),
        bitwise=pair.bitwise,
        headline=view.headline(pair),
        verdict=gate_view.verdict_line(pair, gating) or "",
        gates=tuple(gate_view.gate_rows(pair)),
        gate_lines=gate_view.gate_lines(pair),
        warnings=tuple(view.warning_lines(pair)),
        identity=_identity(pair),
        scope=tuple(view.scope_lines(pair)),
        sections=_sections(pair),
        places=(
            *view.where_lines(pair),
            *structure_view.structure_lines(pair),
            *router_lines(pair),
        ),
        charts=tuple(
            chart
            for chart in (drift_chart(pair), histogram_chart(exhibit.histogram), router_chart(pair))
            if chart is not None
        ),
        confidence=None if confidence is None else confidence_chart(confidence),
        band_lines=tuple(view.band_lines(pair)),
        flip_line=view.flip_line(pair),
        flips=rows[0],
        worst=rows[1],
        sequences=sequences,
        left_out=exhibit.left_out,
        config=_settings(pair.baseline.resolved, pair.candidate.resolved),
        environment=_settings(pair.baseline.environment, pair.candidate.environment),
    )


def next_commands(summary: ReportSummary) -> tuple[tuple[str, str], ...]:
    """Commands and what each shows."""
    return tuple((plain(command), plain(purpose)) for command, purpose in summary.next_commands)


def _identity(pair: PairSummary) -> tuple[IdentityRow, ...]:
    """Without the environment's keys: the page has a table of their own for them."""
    environment = {difference.key for difference in pair.environment_differences}
    return tuple(row for row in identity_rows(pair) if row.label not in environment)


def _sections(pair: PairSummary) -> tuple[tuple[str, tuple[MetricRow, ...]], ...]:
    found = []
    for section, title in view.SECTION_TITLES.items():
        rows = tuple(_metric_row(m) for m in pair.metrics if m.section == section)
        if len({row.note for row in rows}) == 1 and all(row.absent for row in rows):
            rows = (replace(rows[0], label=f"all {len(rows)} metrics", name="", below=False),)
        if rows:
            found.append((title, rows))
    return tuple(found)


def _metric_row(metric: Metric) -> MetricRow:
    return MetricRow(
        label=metric.label.strip(),
        name=metric.name,
        value=metric_value(metric),
        interval=interval(metric.interval, metric.unit),
        normal=view.normal(metric) or "",
        note="" if metric.note is None else plain(metric.note),
        below=metric.label.startswith(" "),
        absent=metric.value is None,
    )


def _settings(
    baseline: Mapping[str, object], candidate: Mapping[str, object]
) -> tuple[SettingRow, ...]:
    """Every key of both sides, sorted; a side that lacks one says so with a hyphen."""
    return tuple(
        SettingRow(
            key=plain(key),
            baseline=plain(baseline.get(key)),
            candidate=plain(candidate.get(key)),
            differs=baseline.get(key) != candidate.get(key),
        )
        for key in sorted(baseline.keys() | candidate.keys())
    )
