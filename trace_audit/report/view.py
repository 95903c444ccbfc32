"""A summary as rows of text, shared by the terminal and Markdown renderers.

Strings here are neutral (no control characters) but not escaped for any output format.
"""

from __future__ import annotations

from collections.abc import Iterable

from trace_audit.diff.summary import (
    Metric,
    MetricSection,
    PairSummary,
    PositionBucket,
    ReportSummary,
    TokenDiff,
    TraceIdentity,
)
from trace_audit.report.batch_axis import batch_axis_line
from trace_audit.report.fault import equality_words, expectation_lines, fault_words
from trace_audit.report.format import (
    count,
    fingerprint,
    interval,
    metric_value,
    number,
    place,
    plain,
)
from trace_audit.report.gate_view import floor_lines, floor_warnings, referee_line
from trace_audit.text import plural

SECTION_TITLES: dict[MetricSection, str] = {
    "logprob": "Forced token, nats",
    "probability": "Forced token, probability",
    "kl": "Whole distribution, nats",
    "distribution": "Logits, ranks, ties",
    "top1": "Best token",
    "router": "Routers: experts chosen",
    "rl": "Importance ratio, candidate over baseline",
}

CONVENTION = (
    "delta = candidate minus baseline log-probability of the forced token, in nats; "
    "positive: the candidate is more confident."
)

REDACTED = "Text is redacted: tokens are told by their ids, and prompts are left out."


def trace_line(trace: TraceIdentity) -> str:
    """What was compared, in one line."""
    parts = [
        plain(trace.model),
        plural(trace.sequences, "sequence"),
        plural(trace.output_tokens, "output token"),
        "+".join(trace.sources),
        f"trace {fingerprint(trace.trace_sha256)}",
        f"model {fingerprint(trace.model_fingerprint)}",
    ]
    vocabulary = f"vocabulary {trace.vocabulary_size:,}"
    if trace.tokenizer_size not in (None, trace.vocabulary_size):
        vocabulary += f" (tokenizer {trace.tokenizer_size:,})"
    return ", ".join([*parts, vocabulary])


def headline(pair: PairSummary) -> str:
    """The result in one sentence."""
    names = f"{plain(pair.candidate.name)} against {plain(pair.baseline.name)}"
    if pair.fault:
        return f"FAULT  {names}: {fault_words(pair)}."
    if pair.bitwise:
        return f"BITWISE  {names}: all {plural(pair.tokens, 'row')} are {equality_words(pair)}."
    parts = [
        plural(pair.tokens, "token"),
        f"mean |delta| {metric_value(pair.metric('abs.mean'))} nats",
    ]
    kl = pair.metric("kl.mean")
    if kl is not None and kl.value is not None:
        parts.append(f"KL {metric_value(kl)} nats")
    if pair.flips.reason is None:
        hard = "" if pair.flips.hard is None else f" ({pair.flips.hard} hard)"
        parts.append(plural(pair.flips.flips, "flip") + hard)
    return f"{names}: {', '.join(parts)}."


def warning_lines(pair: PairSummary) -> list[str]:
    """Everything a reader must know first, as sentences."""
    lines = expectation_lines(pair)
    if pair.non_finite:
        where = place(pair.first_non_finite)
        lines.append(
            f"{plural(pair.non_finite, 'candidate logprob')} not finite, counted and left out of "
            f"every average; the first at {where}"
        )
    lines.extend(plain(warning) for warning in pair.warnings)
    lines.extend(floor_warnings(pair))
    coverage = pair.kl_coverage
    if coverage is not None and coverage.used and coverage.used < pair.tokens:
        lines.append(
            f"KL uses {coverage.used:,} of {pair.tokens:,} tokens ({coverage.no_support} without "
            f"a support, {coverage.infinite} infinite, {coverage.non_finite} not a number)"
        )
    return lines


def scope_lines(pair: PairSummary) -> list[str]:
    """How much was compared, how much it is worth, and which way KL points."""
    tokens = f"{plural(pair.tokens, 'scored token')} of {plural(pair.sequences, 'sequence')}"
    if pair.groups != pair.sequences:
        tokens += f" in {plural(pair.groups, 'group')}"
    if pair.unscored:
        tokens += f" ({pair.unscored:,} masked, not scored)"
    if pair.effective_n is None or pair.design_effect is None:
        tokens += "; one group, so there is no interval"
    else:
        tokens += (
            f"; effective N {count(pair.effective_n)} (design effect {pair.design_effect:.1f})"
        )
    names = f"{plain(pair.baseline.name)} || {plain(pair.candidate.name)}"
    lines = [f"{tokens}; KL is KL({names}) unless it says otherwise."]
    if pair.influence is not None:
        unit = "sequence" if pair.groups == pair.sequences else "group"
        lines.append(
            f"Most influential {unit}: {plain(pair.influence.group_id)}, with "
            f"{number(pair.influence.share, 'share')} of the summed |delta| on "
            f"{number(pair.influence.token_share, 'share')} of the tokens."
        )
    power = [_power(pair.metric(name)) for name in ("abs.mean", "kl.mean")]
    if any(power):
        lines.append(f"Smallest change seen with 80 % power: {', '.join(filter(None, power))}.")
    told = (batch_axis_line(pair), referee_line(pair))
    return [*lines, *floor_lines(pair), *(line for line in told if line is not None)]


def sections(pair: PairSummary) -> list[tuple[str, list[Metric]]]:
    """Metrics that have a value, by section, in table order."""
    found: list[tuple[str, list[Metric]]] = []
    for section, title in SECTION_TITLES.items():
        rows = [m for m in pair.metrics if m.section == section and m.value is not None]
        if rows:
            found.append((title, rows))
    return found


def metric_headers(pair: PairSummary) -> list[str]:
    """Titles of the metric table; the floor has a column where one was measured."""
    floor = ["floor"] if any(metric.floor is not None for metric in pair.metrics) else []
    return ["metric", "value", "95 % interval", *floor]


def metric_cells(pair: PairSummary, metric: Metric) -> list[str]:
    """Cells below the :func:`metric_headers` of the pair."""
    cells = [metric.label, metric_value(metric), interval(metric.interval, metric.unit)]
    if len(metric_headers(pair)) > len(cells):
        cells.append("" if metric.floor is None else number(metric.floor.value, metric.unit))
    return cells


def normal(metric: Metric) -> str | None:
    """What is normal for this metric, in a few words; None where it is not known."""
    band = metric.band
    if band is None:
        return None
    low, high = number(band.low, metric.unit), number(band.high, metric.unit)
    return f"normal: {low}" if low == high else f"normal: {low} to {high}"


def band_lines(pair: PairSummary) -> list[str]:
    """Where the bands come from, a line a source."""
    bands = [metric.band for metric in pair.metrics if metric.band and metric.value is not None]
    sources = dict.fromkeys(band.source for band in bands)
    if not bands:
        return []
    return [
        f"normal for {bands[0].change}: {'; '.join(sources)}. Sizes depend on the model; learn "
        "yours with `gate learn`"
    ]


def remarks(pair: PairSummary) -> list[str]:
    """Reasons of n/a and notes on values, one line a reason."""
    absent = _by_note(metric for metric in pair.metrics if metric.value is None)
    noted = _by_note(metric for metric in pair.metrics if metric.value is not None)
    lines = [f"n/a: {', '.join(names)}: {plain(reason)}" for reason, names in absent.items()]
    lines.extend(f"{', '.join(names)}: {plain(note)}" for note, names in noted.items())
    return lines


def where_lines(pair: PairSummary) -> list[tuple[str, str]]:
    """First differing row and first flip."""
    what = "first nonzero delta" if pair.unequal_rows is None else "first differing bit"
    lines = [(what, place(pair.first_difference))]
    if pair.flips.reason is None:
        lines.append(("first flip", place(pair.first_flip)))
    return lines


def flip_line(pair: PairSummary) -> str:
    """Counts of best-token changes against what noise explains."""
    flips = pair.flips
    if flips.reason is not None:
        return f"n/a: {flips.reason}"
    text = f"{plural(flips.flips, 'flip')}, {plural(flips.tie_changes, 'tie change')}"
    text += f" in {plural(flips.known, 'token')}"
    if flips.hard is None or flips.scale is None or flips.threshold is None:
        return f"{text}; hard flips n/a: no run states the dtype of its logits"
    expected = "" if flips.expected is None else f"; noise explains {number(flips.expected)} flips"
    return (
        f"{text}; {flips.hard} hard (margin over {number(flips.threshold)} nats){expected} "
        f"(gap scatter {number(flips.scale)} nats)"
    )


def bucket_range(bucket: PositionBucket) -> str:
    """First and last position of a bucket."""
    last = bucket.end - 1
    return f"{bucket.start}" if last <= bucket.start else f"{bucket.start}-{last}"


def largest_bucket(pair: PairSummary) -> PositionBucket | None:
    """The bucket of the largest mean, if anything differs."""
    if not pair.buckets:
        return None
    bucket = max(pair.buckets, key=lambda b: b.mean_abs_delta)
    return bucket if bucket.mean_abs_delta > 0 else None


def ranks(token: TokenDiff) -> str:
    """Baseline and candidate rank of the forced token."""
    return f"{plain(token.baseline_rank)}>{plain(token.candidate_rank)}"


def best_change(token: TokenDiff) -> str:
    """The best token of the baseline and of the candidate."""
    sides = [top[0].text if top else "-" for top in (token.baseline_top, token.candidate_top)]
    return f"{sides[0]} → {sides[1]}"


def invalid_lines(summary: ReportSummary) -> list[str]:
    """Candidates that were refused, with the reason."""
    return [f"INVALID  {plain(bad.candidate)}: {plain(bad.message)}" for bad in summary.invalid]


def _power(metric: Metric | None) -> str | None:
    if metric is None or metric.detectable is None:
        return None
    return f"{metric.label} {number(metric.detectable, metric.unit)}"


def _by_note(metrics: Iterable[Metric]) -> dict[str, list[str]]:
    notes: dict[str, list[str]] = {}
    for metric in metrics:
        if metric.note is not None:
            notes.setdefault(metric.note, []).append(metric.name)
    return notes
