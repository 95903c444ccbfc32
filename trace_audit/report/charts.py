"""Charts as geometry: what the HTML template draws as inline SVG, in user units.

Every chart carries its numbers as a table too, for readers who cannot see it.
"""

from __future__ import annotations

import math

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
from trace_audit.report.format import NOT_AVAILABLE, count, interval, number, place, plural
from trace_audit.report.scale import NON_FINITE, ZERO, css_class
from trace_audit.report.view import bucket_range

# What is there must be seen, however small its share.
_MIN_BAR = 2.0
_ROW_HEIGHT = 27.0
_BAR_LEFT, _BAR_WIDTH = 92.0, 250.0


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
    counts = [("0", ZERO, histogram.zero, "exactly 0")]
    counts += [
        (_edge(bin_), css_class(_inside(bin_)), bin_.tokens, _bounds(bin_))
        for bin_ in histogram.bins
    ]
    if histogram.non_finite:
        counts.append(("not finite", NON_FINITE, histogram.non_finite, "not finite"))
    ticks = linear_ticks(max(tokens for _, _, tokens, _ in counts), whole=True)
    slot = (RIGHT - LEFT) / len(counts)
    marks = tuple(
        _count_mark(index, slot, css, tokens, f"|delta| {bounds}: {plural(tokens, 'token')}", ticks)
        for index, (_, css, tokens, bounds) in enumerate(counts)
    )
    labels = [Tick(at=_left_edge(i, slot), label=text) for i, (text, *_) in enumerate(counts)]
    labels[0] = Tick(at=rounded(LEFT + slot / 2), label="0")
    if histogram.non_finite:
        labels.pop()
    return Chart(
        title="Histogram of |delta|",
        description="Tokens by |delta| in nats, log-spaced bins, exact zeros apart.",
        height=BOTTOM + 42,
        x_ticks=(labels[0], *spread(tuple(labels[1:]))),
        y_ticks=tuple(Tick(at=to_y(t, ticks[-1]), label=count(t)) for t in ticks),
        marks=marks,
        headers=("|delta|, nats", "tokens"),
        rows=tuple((bounds, count(tokens)) for _, _, tokens, bounds in counts),
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
    """Top of the plot: intervals are cut where they would flatten the means."""
    most = max(bucket.mean_abs_delta for bucket in buckets)
    ends = [bucket.interval.high for bucket in buckets if bucket.interval is not None]
    return max(most, min(max(ends, default=most), 2 * most))


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
    )


def _flag(where: Place, x: float, name: str, css: str) -> Mark:
    return Mark(
        x=x, y=TOP, width=0, height=PLOT_HEIGHT, css=css, title=f"{name}: {place(where)}"
    )


def _count_mark(
    index: int, slot: float, css: str, tokens: int, title: str, ticks: list[float]
) -> Mark:
    height = BOTTOM - to_y(tokens, ticks[-1])
    height = max(height, _MIN_BAR) if tokens else 0.0
    return Mark(
        x=rounded(_left_edge(index, slot) + 0.5),
        y=rounded(BOTTOM - height),
        width=rounded(slot - 1),
        height=rounded(height),
        css=css,
        title=title,
        label=count(tokens) if tokens else "",
    )


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


def _left_edge(index: int, slot: float) -> float:
    return rounded(LEFT + index * slot)


def _middle(bucket: PositionBucket) -> float:
    return math.expm1((math.log1p(bucket.start) + math.log1p(bucket.end)) / 2)


def _inside(bin_: HistogramBin) -> float:
    """A value of the bin: bins do not straddle colour classes."""
    if bin_.low == 0:
        return bin_.high / 2
    return bin_.low * 1.01 if math.isinf(bin_.high) else math.sqrt(bin_.low * bin_.high)


def _edge(bin_: HistogramBin) -> str:
    return ">0" if bin_.low == 0 else f"{bin_.low:.1e}".replace("e-0", "e-").replace("e+0", "e")


def _bounds(bin_: HistogramBin) -> str:
    if math.isinf(bin_.high):
        return f"{number(bin_.low)} and over"
    return f"{number(bin_.low)} to {number(bin_.high)}"


def _probabilities(bucket: ConfidenceBucket) -> str:
    return f"{bucket.low:g}-{bucket.high:g}"


def _mean(bucket: ConfidenceBucket) -> str:
    return NOT_AVAILABLE if bucket.mean_abs_delta is None else number(bucket.mean_abs_delta)
