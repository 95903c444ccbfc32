"""Charts as geometry: what the HTML template draws as inline SVG, in user units.

Every chart carries its numbers as a table too, for readers who cannot see it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trace_audit.diff.distributions import ConfidenceBucket, Histogram, HistogramBin
from trace_audit.diff.summary import PairSummary, Place, PositionBucket
from trace_audit.report.chart import (
    BOTTOM,
    LEFT,
    PLOT_HEIGHT,
    RIGHT,
    TOP,
    Chart,
    Mark,
    Tick,
    linear_ticks,
    rounded,
    spread,
    to_y,
)
from trace_audit.report.format import NOT_AVAILABLE, count, interval, number, place
from trace_audit.report.scale import NON_FINITE, ZERO, css_class
from trace_audit.report.view import bucket_range
from trace_audit.text import plural

# What is there must be seen, however small its share.
_MIN_BAR = 2.0
# Few bins make slim bars, not slabs.
_MIN_SLOTS = 12
_ROW_HEIGHT = 27.0
_BAR_LEFT, _BAR_WIDTH = 92.0, 250.0


@dataclass(frozen=True, kw_only=True)
class _Count:
    """One bar of the histogram: its axis label, class, tokens and range in words."""

    label: str
    css: str
    tokens: int
    bounds: str


def drift_chart(pair: PairSummary) -> Chart | None:
    """Mean |delta| over absolute position with its intervals; None without a token."""
    buckets = pair.buckets
    if not buckets:
        return None
    first, last = buckets[0].start, buckets[-1].end
    highest = _drift_ceiling(buckets)
    ticks = linear_ticks(highest)
    top = ticks[-1]

    def x(position: float) -> float:
        share = (math.log1p(position) - math.log1p(first)) / (math.log1p(last) - math.log1p(first))
        return rounded(LEFT + share * (RIGHT - LEFT))

    marks = tuple(_drift_mark(bucket, x(_middle(bucket)), top) for bucket in buckets)
    return Chart(
        title="Drift over position",
        description="Mean |delta| in nats by absolute position, log-spaced buckets.",
        height=BOTTOM + 42,
        x_ticks=spread(tuple(Tick(at=x(b.start), label=str(b.start)) for b in buckets)),
        y_ticks=tuple(Tick(at=to_y(t, top), label=number(t)) for t in ticks),
        marks=marks,
        line=" ".join(f"{mark.x},{mark.y}" for mark in marks),
        flags=tuple(
            _flag(where, x(where.position + 0.5), name, css)
            for where, name, css in (
                (pair.first_difference, "first difference", "first-difference"),
                (pair.first_flip, "first flip", "first-flip"),
            )
            if where is not None and first <= where.position < last
        ),
        headers=("position", "tokens", "mean |delta|", "95 % interval"),
        rows=tuple(
            (
                bucket_range(bucket),
                count(bucket.tokens),
                number(bucket.mean_abs_delta),
                interval(bucket.interval, "nats") or NOT_AVAILABLE,
            )
            for bucket in buckets
        ),
        x_title="absolute position (log)",
    )


def histogram_chart(histogram: Histogram) -> Chart:
    """Tokens by |delta|: a bar for exactly zero, log-spaced bins, a bar for non-finite values."""
    # An empty place between the bins and what is not on their scale.
    bars: list[_Count | None] = [
        _Count(label="0", css=ZERO, tokens=histogram.zero, bounds="exactly 0"),
        None,
    ]
    bars += [_count(bin_) for bin_ in histogram.bins]
    if histogram.non_finite:
        tokens = histogram.non_finite
        bars += [None, _Count(label="inf, nan", css=NON_FINITE, tokens=tokens, bounds="not finite")]
    counted = [bar for bar in bars if bar is not None]
    ticks = linear_ticks(max(bar.tokens for bar in counted), whole=True)
    slot = (RIGHT - LEFT) / max(len(bars), _MIN_SLOTS)
    return Chart(
        title="Histogram of |delta|",
        description="Tokens by |delta| in nats, log-spaced bins, exact zeros apart.",
        height=BOTTOM + 42,
        x_ticks=_histogram_ticks(histogram, bars, slot),
        y_ticks=tuple(Tick(at=to_y(t, ticks[-1]), label=count(t)) for t in ticks),
        marks=tuple(
            _count_mark(index, slot, bar, ticks[-1])
            for index, bar in enumerate(bars)
            if bar is not None
        ),
        headers=("|delta|, nats", "tokens"),
        rows=tuple((bar.bounds, count(bar.tokens)) for bar in counted),
        x_title="|delta|, nats (log)",
    )


def confidence_chart(buckets: tuple[ConfidenceBucket, ...]) -> Chart:
    """Mean |delta| as a bar for each bucket of the baseline's top-1 probability."""
    most = max((b.mean_abs_delta or 0.0 for b in buckets), default=0.0)
    return Chart(
        title="Confidence",
        description="Mean |delta| in nats by the baseline's top-1 probability.",
        height=_ROW_HEIGHT * len(buckets) + 6,
        x_ticks=(),
        y_ticks=tuple(
            Tick(at=rounded(_ROW_HEIGHT * (i + 0.5) + 4), label=_probabilities(bucket))
            for i, bucket in enumerate(buckets)
        ),
        marks=tuple(_confidence_mark(i, bucket, most) for i, bucket in enumerate(buckets)),
        headers=("top-1 probability", "tokens", "mean |delta|", "95 % interval"),
        rows=tuple(
            (
                _probabilities(bucket),
                count(bucket.tokens),
                _mean(bucket),
                interval(bucket.interval, "nats") or NOT_AVAILABLE,
            )
            for bucket in buckets
        ),
        left=_BAR_LEFT,
    )


def _drift_ceiling(buckets: tuple[PositionBucket, ...]) -> float:
    """Top of the plot: intervals are cut, visibly, where they would flatten the means."""
    most = max(bucket.mean_abs_delta for bucket in buckets)
    ends = [bucket.interval.high for bucket in buckets if bucket.interval is not None]
    return max(most, min(max(ends, default=most), 1.5 * most))


def _drift_mark(bucket: PositionBucket, x: float, top: float) -> Mark:
    mean, bounds = bucket.mean_abs_delta, bucket.interval
    return Mark(
        x=x,
        y=to_y(mean, top),
        width=0,
        height=0,
        css="zero" if mean == 0 else "point",
        title=f"position {bucket_range(bucket)}: {number(mean)} nats "
        f"{interval(bounds, 'nats')}, {plural(bucket.tokens, 'token')}",
        low=None if bounds is None else to_y(bounds.low, top),
        high=None if bounds is None else to_y(min(bounds.high, top), top),
        cut=bounds is not None and bounds.high > top,
    )


def _flag(where: Place, x: float, name: str, css: str) -> Mark:
    return Mark(x=x, y=TOP, width=0, height=PLOT_HEIGHT, css=css, title=f"{name}: {place(where)}")


def _count(bin_: HistogramBin) -> _Count:
    css = css_class(_inside(bin_))
    return _Count(label=_edge(bin_), css=css, tokens=bin_.tokens, bounds=_bounds(bin_))


def _count_mark(index: int, slot: float, bar: _Count, top: float) -> Mark:
    height = max(BOTTOM - to_y(bar.tokens, top), _MIN_BAR) if bar.tokens else 0.0
    return Mark(
        x=rounded(LEFT + index * slot + 0.5),
        y=rounded(BOTTOM - height),
        width=rounded(slot - 1),
        height=rounded(height),
        css=bar.css,
        title=f"|delta| {bar.bounds}: {plural(bar.tokens, 'token')}",
        label=count(bar.tokens) if bar.tokens else "",
    )


def _histogram_ticks(
    histogram: Histogram, bars: Sequence[_Count | None], slot: float
) -> tuple[Tick, ...]:
    """Zero, then whole decades; every bin where there are fewer than two of those."""
    places = [(LEFT + i * slot, bar) for i, bar in enumerate(bars) if bar is not None]
    zero = Tick(at=rounded(places[0][0] + slot / 2), label=places[0][1].label)
    edges = [
        Tick(at=rounded(at), label=bar.label) for at, bar in places[1:] if bar.css != NON_FINITE
    ]
    decades = [tick for tick in edges if tick.label.startswith("1e")]
    last: tuple[Tick, ...] = ()
    if histogram.non_finite:
        last = (Tick(at=rounded(places[-1][0] + slot / 2), label=places[-1][1].label),)
    return (zero, *spread(tuple(decades if len(decades) > 1 else edges)), *last)


def _confidence_mark(index: int, bucket: ConfidenceBucket, most: float) -> Mark:
    mean = bucket.mean_abs_delta
    width = 0.0 if not mean or not most else max(_MIN_BAR, mean / most * _BAR_WIDTH)
    return Mark(
        x=_BAR_LEFT,
        y=rounded(_ROW_HEIGHT * index + 8),
        width=rounded(width),
        height=_ROW_HEIGHT - 8,
        css=ZERO if not mean else css_class(mean),
        title=f"top-1 probability {_probabilities(bucket)}: {_mean(bucket)} nats "
        f"{interval(bucket.interval, 'nats')}, {plural(bucket.tokens, 'token')}",
        label=f"{_mean(bucket)}  ({plural(bucket.tokens, 'token')})",
    )


def _middle(bucket: PositionBucket) -> float:
    return math.expm1((math.log1p(bucket.start) + math.log1p(bucket.end)) / 2)


def _inside(bin_: HistogramBin) -> float:
    """A value of the bin: bins do not straddle colour classes."""
    if bin_.low == 0:
        return bin_.high / 2
    return bin_.low * 1.01 if math.isinf(bin_.high) else math.sqrt(bin_.low * bin_.high)


def _edge(bin_: HistogramBin) -> str:
    """The bin's lower end; whole decades have one digit."""
    if bin_.low == 0:
        return ">0"
    mantissa, exponent = f"{bin_.low:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def _bounds(bin_: HistogramBin) -> str:
    if math.isinf(bin_.high):
        return f"{number(bin_.low)} and over"
    return f"{number(bin_.low)} to {number(bin_.high)}"


def _probabilities(bucket: ConfidenceBucket) -> str:
    return f"{bucket.low:g}-{bucket.high:g}"


def _mean(bucket: ConfidenceBucket) -> str:
    return NOT_AVAILABLE if bucket.mean_abs_delta is None else number(bucket.mean_abs_delta)
