"""One candidate against one baseline: align, measure, summarize."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from trace_audit.diff import identity
from trace_audit.diff.align import AlignedPair, reduced
from trace_audit.diff.bands import with_bands
from trace_audit.diff.bootstrap import Resampler
from trace_audit.diff.config_differences import config_differences, environment_differences
from trace_audit.diff.details import TokenDetails
from trace_audit.diff.exact_kl import ExactKL, exact_check, exact_kl, exact_warnings
from trace_audit.diff.expected import checked, expectation
from trace_audit.diff.flips import TopChanges, top_changes
from trace_audit.diff.floor import FloorBook, MeasuredFloor, gap_change_floor, with_floors
from trace_audit.diff.hints import hints
from trace_audit.diff.kl_metrics import kl_coverage
from trace_audit.diff.metric import Metric
from trace_audit.diff.metrics import MetricTable
from trace_audit.diff.pair_rows import PairRows
from trace_audit.diff.pair_structure import pair_structure
from trace_audit.diff.profiles import PROFILE_FLOOR_FACTOR
from trace_audit.diff.referee import judged_by
from trace_audit.diff.router_metrics import router_summary
from trace_audit.diff.scoring import check_referee as check_scoring_of
from trace_audit.diff.scoring import why_not_gated
from trace_audit.diff.source import AuditSource
from trace_audit.diff.structure import first_place, influence, position_buckets, worst_rows
from trace_audit.diff.summary import (
    Expectation,
    FlipSummary,
    PairSummary,
)
from trace_audit.diff.verdict import Referee

NUM_WORST = 10


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A pair with its per-row results and its summary."""

    pair: AlignedPair
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
    rows = checked_rows(source, baseline, candidate, referee)
    # Before the pair is read: each pair of repeats takes as much memory as it does.
    floors = (book or FloorBook(source)).floors(baseline, candidate)
    expected = expectation(source.info(baseline), source.info(candidate))
    exact = exact_kl(source, rows)
    exact_rows = None if isinstance(exact, str) else exact.row
    pair = reduced(rows, differences=expected is not None, exact_rows=exact_rows)
    changes = top_changes(pair, gap_floor=gap_change_floor(floors))
    details = TokenDetails(source, pair, changes)
    summary = _pair_summary(source, pair, changes, details, floors, checked(expected, pair), exact)
    if referee is not None:
        summary = replace(summary, referee=_referee(pair, summary, referee))
    return Comparison(pair=pair, changes=changes, details=details, summary=summary)


def checked_rows(
    source: AuditSource, baseline: str, candidate: str, referee: str | None
) -> PairRows:
    """The rows of two runs, before any number of them is read.

    Raises:
        InvalidComparisonError: They cannot be compared.
        AuditDirError: A run is unknown or damaged.
    """
    identity.check_comparable(source.info(baseline), source.info(candidate), candidate)
    if referee is not None:
        check_scoring_of(*(identity.run_identity(n, source.info(n)) for n in (referee, baseline)))
    return source.pair_rows(baseline, candidate, referee=referee)


def _referee(pair: AlignedPair, summary: PairSummary, name: str) -> Referee:
    kl = summary.metric("kl.mean")
    margin = 0.0 if kl is None or kl.floor is None else PROFILE_FLOOR_FACTOR * kl.floor.value
    return judged_by(pair, name, Resampler(len(pair.group_ids)), margin=margin)


def _pair_summary(
    source: AuditSource,
    pair: AlignedPair,
    changes: TopChanges | None,
    details: TokenDetails,
    floors: Sequence[MeasuredFloor],
    expected: Expectation | None,
    exact: ExactKL | str,
) -> PairSummary:
    names = (pair.baseline_name, pair.candidate_name)
    baseline, candidate = (identity.run_identity(name, source.info(name)) for name in names)
    config = config_differences(baseline, candidate)
    environment = environment_differences(baseline, candidate)
    resampler = Resampler(len(pair.group_ids))
    table = MetricTable(pair, resampler)
    unequal = pair.unequal
    bitwise = unequal is not None and not unequal.any()
    refused = source.excess_refused(*names)
    check = exact_check(exact, pair.exact)
    with ThreadPoolExecutor(max_workers=1) as beside:
        # What needs no metric is found beside them.
        worst = beside.submit(lambda: tuple(details.tokens(worst_rows(pair, NUM_WORST))))
        buckets = beside.submit(position_buckets, pair, resampler)
        hinted = beside.submit(hints, pair)
        metrics: tuple[Metric, ...] = ()
        if not bitwise:
            metrics = table.metrics(changes, excess_refused=refused, exact=exact, check=check)
    metrics = with_bands(with_floors(metrics, floors), baseline, candidate)
    return PairSummary(
        baseline=baseline,
        candidate=candidate,
        config_differences=config,
        environment_differences=environment,
        warnings=(
            *identity.warnings(baseline, candidate, config, environment),
            *hinted.result(),
            *exact_warnings(check),
        ),
        sequences=len(pair.sequences),
        groups=len(pair.group_ids),
        tokens=len(pair),
        unscored=pair.unscored,
        bitwise=bitwise,
        unequal_rows=None if unequal is None else int(unequal.sum()),
        expected=expected,
        non_finite=int(pair.lost.sum()),
        effective_n=table.effective_n,
        design_effect=table.design_effect,
        influence=influence(pair, table.sizes),
        metrics=metrics,
        kl_coverage=kl_coverage(pair),
        exact_check=None if bitwise else check,
        flips=_flip_summary(changes, details),
        first_difference=first_place(pair, (pair.delta != 0) if unequal is None else unequal),
        first_flip=None if changes is None else first_place(pair, changes.flip),
        first_non_finite=first_place(pair, pair.lost),
        buckets=buckets.result(),
        worst=worst.result(),
        floors=tuple(floor.summary for floor in floors),
        not_gated=why_not_gated(baseline, candidate),
        structure=None if bitwise else pair_structure(pair, resampler, metrics, candidate),
        router=router_summary(pair, resampler, table.design_effect),
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
        scale=changes.median_scale,
        threshold=changes.median_threshold,
        examples=tuple(details.tokens(widest.tolist())),
    )
