"""Several candidates against one baseline: what can be compared, then one pair at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trace_audit.diff import identity
from trace_audit.diff.compare import Comparison, checked_rows, compare
from trace_audit.diff.floor import FloorBook
from trace_audit.diff.gate import judge
from trace_audit.diff.referee import check_referee
from trace_audit.diff.source import AuditSource
from trace_audit.diff.summary import (
    REPORT_FORMAT_VERSION,
    InvalidPair,
    PairSummary,
    ReportSummary,
)
from trace_audit.diff.verdict import Gating
from trace_audit.errors import InvalidComparisonError, UsageError


@dataclass(frozen=True, kw_only=True)
class ReportPlan:
    """Comparisons that can be made, found out before any of them is.

    Attributes:
        candidates: Cheapest first (engine seconds), unknown cost last.
        empty: The report without a pair.
    """

    source: AuditSource
    candidates: tuple[str, ...]
    empty: ReportSummary
    referee: str | None = None

    def run(self, consume: Callable[[Comparison], object] | None = None) -> ReportSummary:
        """Compares each candidate, and judges it if the report gates anything.

        Args:
            consume: Called with each comparison, which is gone when the next one is computed.
        """
        book = FloorBook(self.source)
        pairs = tuple(self._compared(name, book, consume) for name in self.candidates)
        commands = _next_commands(self.empty.trace.path, self.empty.baseline, pairs)
        return replace(self.empty, pairs=pairs, next_commands=commands)

    def _compared(
        self, candidate: str, book: FloorBook, consume: Callable[[Comparison], object] | None
    ) -> PairSummary:
        comparison = compare(
            self.source, self.empty.baseline, candidate, book=book, referee=self.referee
        )
        if self.empty.gating is not None:
            verdict = judge(comparison.summary, self.empty.gating)
            comparison = replace(comparison, summary=replace(comparison.summary, verdict=verdict))
        if consume is not None:
            consume(comparison)
        return comparison.summary


def plan_report(
    source: AuditSource,
    baseline: str,
    candidates: Sequence[str],
    gating: Gating | None = None,
    *,
    referee: str | None = None,
) -> ReportPlan:
    """Finds out which candidates can be compared with a baseline.

    A candidate that cannot becomes an :class:`InvalidPair` if there are others; alone it is an
    error.

    Raises:
        UsageError: There is no candidate, or the baseline is one.
        InvalidComparisonError: No candidate can be compared.
    """
    check_candidates(baseline, candidates)
    check_referee(referee, baseline, tuple(candidates))
    valid: list[str] = []
    invalid: list[InvalidPair] = []
    errors: list[InvalidComparisonError] = []
    for candidate in candidates:
        try:
            checked_rows(source, baseline, candidate, referee)
            valid.append(candidate)
        except InvalidComparisonError as error:
            errors.append(error)
            invalid.append(InvalidPair(candidate=candidate, message=error.message, hint=error.hint))
    if not valid:
        raise errors[0]
    empty = ReportSummary(
        format_version=REPORT_FORMAT_VERSION,
        trace=source.trace_identity(),
        baseline=baseline,
        pairs=(),
        invalid=tuple(invalid),
        next_commands=(),
        gating=gating,
        redacted=source.redact_text,
    )
    ordered = tuple(sorted(valid, key=lambda name: _cost(source, name)))
    return ReportPlan(source=source, candidates=ordered, empty=empty, referee=referee)


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


def _cost(source: AuditSource, name: str) -> tuple[float, str]:
    seconds = identity.run_identity(name, source.info(name)).engine_seconds
    return (np.inf if seconds is None else seconds, name)


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
