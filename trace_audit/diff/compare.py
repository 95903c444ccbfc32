"""One candidate against one baseline: align, measure, summarize."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trace_audit.diff import identity
from trace_audit.diff.align import AlignedPair, align
from trace_audit.diff.bands import with_bands
from trace_audit.diff.bootstrap import Resampler
from trace_audit.diff.details import TokenDetails
from trace_audit.diff.exact_kl import exact_check, exact_kl, exact_warnings
from trace_audit.diff.expected import checked, expectation
from trace_audit.diff.flips import TopChanges, top_changes
from trace_audit.diff.floor import FloorBook, MeasuredFloor, gap_change_floor, with_floors
from trace_audit.diff.gate import judge
from trace_audit.diff.hints import hints
from trace_audit.diff.kl import KLTerms
from trace_audit.diff.kl_metrics import kl_coverage, pair_kl
from trace_audit.diff.metrics import MetricTable, lost_rows, unequal_rows
from trace_audit.diff.pair_structure import pair_structure
from trace_audit.diff.profiles import PROFILE_FLOOR_FACTOR
from trace_audit.diff.referee import check_referee, judged_by
from trace_audit.diff.scoring import check_referee as check_scoring_of
from trace_audit.diff.scoring import why_not_gated
from trace_audit.diff.source import AuditSource
from trace_audit.diff.structure import first_place, influence, position_buckets, worst_rows
from trace_audit.diff.summary import (
    REPORT_FORMAT_VERSION,
    FlipSummary,
    InvalidPair,
    PairSummary,
    ReportSummary,
)
from trace_audit.diff.verdict import Gating, Referee
from trace_audit.errors import InvalidComparisonError, UsageError

NUM_WORST = 10


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A pair with its per-row results and its summary."""

    pair: AlignedPair
    kl: KLTerms | None
    changes: TopChanges | None
    details: TokenDetails
    summary: PairSummary


def compare(
    source: AuditSource,
    baseline: str,
    candidate: str,
    *,
    book: FloorBook | None = None,
    referee: str | None = None,
) -> Comparison:
    """Compares two runs of an audit.

    Args:
        source: Where the runs are.
        baseline: Run to compare with.
        candidate: Run under test.
        book: Floors that were measured already.
        referee: Run that says which of the two is nearer to it.

    Raises:
        InvalidComparisonError: They cannot be compared.
        AuditDirError: A run is unknown or damaged.
    """
    identity.check_comparable(source.info(baseline), source.info(candidate), candidate)
    if referee is not None:
        check_scoring_of(*(identity.run_identity(n, source.info(n)) for n in (referee, baseline)))
    pair = align(
        source.trace,
        source.rows(baseline),
        source.rows(candidate),
        record=source.record_rows(),
    )
    kl, reverse = pair_kl(pair)
    floors = (book or FloorBook(source)).floors(baseline, candidate)
    changes = top_changes(pair, gap_floor=gap_change_floor(floors))
    details = TokenDetails(source, pair, kl, changes)
    summary = _pair_summary(source, pair, kl, reverse, changes, details, floors)
    if referee is not None:
        summary = replace(summary, referee=_referee(source, pair, summary, referee))
    return Comparison(pair=pair, kl=kl, changes=changes, details=details, summary=summary)


def compare_all(
    source: AuditSource,
    baseline: str,
    candidates: Sequence[str],
    gating: Gating | None = None,
    *,
    referee: str | None = None,
) -> tuple[ReportSummary, list[Comparison]]:
    """Compares several candidates with one baseline, and judges each if there is a ``gating``.

    A candidate that cannot be compared becomes an :class:`InvalidPair` if there are others; alone
    it is an error.

    Raises:
        UsageError: There is no candidate, or the baseline is one.
        InvalidComparisonError: No candidate can be compared.
    """
    check_candidates(baseline, candidates)
    check_referee(referee, baseline, tuple(candidates))
    done: list[Comparison] = []
    invalid: list[InvalidPair] = []
    errors: list[InvalidComparisonError] = []
    book = FloorBook(source)
    for candidate in candidates:
        try:
            comparison = compare(source, baseline, candidate, book=book, referee=referee)
            done.append(_judged(comparison, gating))
        except InvalidComparisonError as error:
            errors.append(error)
            invalid.append(InvalidPair(candidate=candidate, message=error.message, hint=error.hint))
    if not done:
        raise errors[0]
    done.sort(key=_cost)
    pairs = tuple(comparison.summary for comparison in done)
    return (
        ReportSummary(
            format_version=REPORT_FORMAT_VERSION,
            trace=source.trace_identity(),
            baseline=baseline,
            pairs=pairs,
            invalid=tuple(invalid),
            next_commands=_next_commands(str(source.audit.path), baseline, pairs),
            gating=gating,
            redacted=source.redact_text,
        ),
        done,
    )


def check_candidates(baseline: str, candidates: Sequence[str]) -> None:
    """Refuses an empty comparison and one of a run with itself.

    Raises:
        UsageError: Either of them.
    """
    if not candidates:
        raise UsageError(
            f"There is no run to compare with {baseline!r}.",
            hint="Make one with: trace-audit replay DIR --config TOML",
        )
    if baseline in candidates:
        raise UsageError(
            f"Run {baseline!r} is both baseline and candidate; a run always equals itself.",
            hint="Replay the same configuration again to see whether it repeats.",
        )


def _judged(comparison: Comparison, gating: Gating | None) -> Comparison:
    if gating is None:
        return comparison
    summary = comparison.summary
    return replace(comparison, summary=replace(summary, verdict=judge(summary, gating)))


def _referee(source: AuditSource, pair: AlignedPair, summary: PairSummary, name: str) -> Referee:
    kl = summary.metric("kl.mean")
    margin = 0.0 if kl is None or kl.floor is None else PROFILE_FLOOR_FACTOR * kl.floor.value
    return judged_by(pair, source.rows(name), Resampler(len(pair.group_ids)), margin=margin)


def _cost(comparison: Comparison) -> tuple[float, str]:
    seconds = comparison.summary.candidate.engine_seconds
    return (np.inf if seconds is None else seconds, comparison.summary.candidate.name)


def _pair_summary(
    source: AuditSource,
    pair: AlignedPair,
    kl: KLTerms | None,
    reverse: KLTerms | None,
    changes: TopChanges | None,
    details: TokenDetails,
    floors: Sequence[MeasuredFloor],
) -> PairSummary:
    names = (pair.baseline_name, pair.candidate_name)
    baseline, candidate = (identity.run_identity(name, source.info(name)) for name in names)
    config = identity.config_differences(baseline, candidate)
    environment = identity.environment_differences(baseline, candidate)
    resampler = Resampler(len(pair.group_ids))
    table = MetricTable(pair, resampler)
    unequal, lost = unequal_rows(pair), lost_rows(pair)
    bitwise = unequal is not None and not unequal.any()
    refused = source.excess_refused(*names)
    exact = exact_kl(source, pair)
    check = exact_check(exact, kl, reverse)
    metrics = (
        () if bitwise else table.metrics(kl, reverse, changes, excess_refused=refused, exact=exact)
    )
    metrics = with_bands(with_floors(metrics, floors), baseline, candidate)
    return PairSummary(
        baseline=baseline,
        candidate=candidate,
        config_differences=config,
        environment_differences=environment,
        warnings=(
            *identity.warnings(baseline, candidate, config, environment),
            *hints(pair),
            *exact_warnings(check),
        ),
        sequences=len(np.unique(pair.sequence)),
        groups=len(pair.group_ids),
        tokens=len(pair),
        unscored=pair.unscored,
        bitwise=bitwise,
        unequal_rows=None if unequal is None else int(unequal.sum()),
        expected=checked(expectation(*(source.info(name) for name in names)), pair),
        non_finite=int(lost.sum()),
        effective_n=table.effective_n,
        design_effect=table.design_effect,
        influence=influence(pair),
        metrics=metrics,
        kl_coverage=kl_coverage(kl, reverse),
        exact_check=None if bitwise else check,
        flips=_flip_summary(changes, details),
        first_difference=first_place(pair, (pair.delta != 0) if unequal is None else unequal),
        first_flip=None if changes is None else first_place(pair, changes.flip),
        first_non_finite=first_place(pair, lost),
        buckets=position_buckets(pair, resampler),
        worst=tuple(details.token(row) for row in worst_rows(pair, NUM_WORST)),
        floors=tuple(floor.summary for floor in floors),
        not_gated=why_not_gated(baseline, candidate),
        structure=None if bitwise else pair_structure(pair, resampler, kl, metrics, candidate),
    )


def _flip_summary(changes: TopChanges | None, details: TokenDetails) -> FlipSummary:
    if changes is None:
        return FlipSummary(
            known=0,
            flips=0,
            hard=None,
            tie_changes=0,
            expected=None,
            scale=None,
            threshold=None,
            examples=(),
            reason="a run has no best tokens of its own",
        )
    flips = np.flatnonzero(changes.flip)
    widest = flips[np.argsort(-changes.gap[flips], kind="stable")][:NUM_WORST]
    return FlipSummary(
        known=int(changes.known.sum()),
        flips=len(flips),
        hard=None if changes.hard is None else int(changes.hard.sum()),
        tie_changes=int(changes.tie_change.sum()),
        expected=None if changes.expected is None else float(changes.expected.sum()),
        scale=None if changes.scale is None else float(np.nanmedian(changes.scale)),
        threshold=None if changes.threshold is None else float(np.nanmedian(changes.threshold)),
        examples=tuple(details.token(int(row)) for row in widest),
    )


def _next_commands(
    path: str, baseline: str, pairs: Sequence[PairSummary]
) -> tuple[tuple[str, str], ...]:
    option = "" if baseline == "record" else f" --baseline {baseline}"
    commands = []
    if len(pairs) > 1:
        worst = max(pairs, key=_divergence).candidate.name
        commands.append(
            (f"trace-audit diff report {path} --candidate {worst}{option}", "its full table")
        )
    different = [pair for pair in pairs if pair.worst]
    if different:
        name = max(different, key=_divergence).candidate.name
        show = f"trace-audit diff show {path} --candidate {name}{option}"
        commands.append((f"{show} --worst 20", "the worst tokens, both sides' best"))
    if any(pair.candidate.name == "imported" for pair in pairs):
        commands.append((f"trace-audit diff report {path} --profile rl", "against the rollout"))
    commands.append((f"trace-audit diff report {path}{option} --format json", "all numbers"))
    return tuple(commands)


def _divergence(pair: PairSummary) -> float:
    metric = pair.metric("abs.mean")
    return -1.0 if metric is None or metric.value is None else metric.value
