"""Token metrics of a pair of runs, each with its interval or the reason why it cannot be had."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from trace_audit.diff.align import AlignedPair
from trace_audit.diff.bootstrap import Resampler
from trace_audit.diff.catalog import CATALOG, absent, metric
from trace_audit.diff.columns import FloatArray
from trace_audit.diff.estimators import Estimate, GroupedTokens
from trace_audit.diff.exact_kl import NOT_ASKED, ExactKL, exact_metrics
from trace_audit.diff.flips import TopChanges
from trace_audit.diff.intervals import clipped
from trace_audit.diff.kl import KLTerms
from trace_audit.diff.kl_metrics import kl_metrics, why_not_sampled
from trace_audit.diff.rl import rl_metrics
from trace_audit.diff.summary import Interval, Metric

BoolArray = NDArray[np.bool_]

_MIN_EXPECTED_FLIPS = 5.0
_TAIL_TOKENS = 10_000
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99_9": 0.999}


class MetricTable:
    """Computes the table of one pair.

    Attributes:
        design_effect: Of mean |delta|; None with one group or no finite row.
        effective_n: Finite rows over the design effect.
    """

    def __init__(self, pair: AlignedPair, resampler: Resampler) -> None:
        """Measures a pair; the resampler draws from its groups."""
        self.pair = pair
        self._resampler = resampler
        plain = GroupedTokens(pair.group[pair.finite], resampler)
        size = np.abs(pair.delta[pair.finite])
        self.design_effect = plain.design_effect(size) if len(size) else None
        self.effective_n = None if self.design_effect is None else len(size) / self.design_effect

    def metrics(
        self,
        kl: KLTerms | None,
        reverse: KLTerms | None,
        changes: TopChanges | None,
        *,
        excess_refused: str | None = "the dtypes of the runs are not known",
        exact: ExactKL | str = NOT_ASKED,
    ) -> tuple[Metric, ...]:
        """Every metric of the catalog, in its order.

        Args:
            kl: KL(baseline || candidate) of each row, where it can be had.
            reverse: KL(candidate || baseline) of each row.
            changes: Changes of the best token, where they are known.
            excess_refused: Why `kl.excess` has no meaning here; None if it has one.
            exact: The exact KL, or why it cannot be had.
        """
        if not self.pair.finite.any():
            reason = "every candidate logprob is non-finite"
            if not lost_rows(self.pair).all():
                reason = "no token has a finite logprob on both sides"
            return tuple(absent(name, reason) for name in CATALOG)
        rows = [
            *self._delta_metrics(),
            *self._probability_metrics(),
            *kl_metrics(self.pair, self.grouped, kl, reverse, excess_refused=excess_refused),
            *exact_metrics(self.grouped, len(self.pair), exact, kl, reverse),
            *self._distribution_metrics(),
            *self._top_metrics(changes),
            *rl_metrics(self.pair, self.grouped, why_not_sampled(self.pair)),
        ]
        order = list(CATALOG)
        return tuple(sorted(rows, key=lambda row: order.index(row.name)))

    def grouped(self, mask: BoolArray) -> GroupedTokens:
        """The groups of some rows (mask bool [N])."""
        effect = 1.0 if self.design_effect is None else self.design_effect
        return GroupedTokens(self.pair.group[mask], self._resampler, design_effect=effect)

    def _delta_metrics(self) -> Iterable[Metric]:
        tokens = self.grouped(self.pair.finite)
        delta = self.pair.delta[self.pair.finite]
        size = np.abs(delta)
        yield metric("delta.mean", tokens.mean(delta))
        yield metric("abs.mean", tokens.mean(size))
        yield metric("delta.rms", _transformed(tokens.mean(delta**2), np.sqrt, minimum=0.0))
        yield from _quantile_metrics(tokens, size, "abs", tuple(_QUANTILES))
        yield metric("abs.max", Estimate(value=float(size.max())), note="grows with the tokens")
        yield metric("delta.equal", tokens.share(delta == 0))
        yield self._unequal_rows()

    def _unequal_rows(self) -> Metric:
        unequal = unequal_rows(self.pair)
        if unequal is None:
            return absent("rows.unequal", "a run has no logits hash")
        everywhere = np.ones(len(self.pair), dtype=np.bool_)
        return metric("rows.unequal", self.grouped(everywhere).share(unequal))

    def _probability_metrics(self) -> Iterable[Metric]:
        tokens = self.grouped(self.pair.finite)
        delta = self.pair.delta[self.pair.finite]
        baseline = self.pair.baseline.logprob[self.pair.finite]
        candidate = self.pair.candidate.logprob[self.pair.finite]
        change = np.exp(candidate) - np.exp(baseline)
        ratio = np.exp(delta)
        yield metric("tme", tokens.mean(np.exp(np.abs(delta))))
        yield metric("ratio.outside", tokens.share((ratio < 0.9) | (ratio > 1.1)))
        yield metric("dp.rms", _transformed(tokens.mean(change**2), np.sqrt, minimum=0.0))
        yield from _quantile_metrics(tokens, np.abs(change), "dp", ("p50", "p99"))
        yield metric("ppl.baseline", _transformed(tokens.mean(-baseline), np.exp))
        yield metric("ppl.candidate", _transformed(tokens.mean(-candidate), np.exp))
        yield metric("ppl.ratio", _transformed(tokens.mean(-delta), np.exp))

    def _distribution_metrics(self) -> Iterable[Metric]:
        a, b = self.pair.baseline, self.pair.candidate
        yield self._column_mean("lse.drift", a.logsumexp, b.logsumexp, "logsumexp")
        yield self._column_mean("entropy.drift", a.entropy, b.entropy, "entropy")
        yield self._column_share("rank.changed", [a.rank, b.rank], lambda x, y: x != y, "rank")
        for side, run in (("baseline", a), ("candidate", b)):
            name = f"ties.{side}"
            yield self._column_share(name, [run.tie_count], lambda x: x > 0, "tie count")

    def _column_mean(
        self, name: str, a: FloatArray | None, b: FloatArray | None, what: str
    ) -> Metric:
        if a is None or b is None:
            return absent(name, f"a run has no {what}")
        mask = np.isfinite(b - a)
        if not mask.any():
            return absent(name, f"no row has a finite {what} on both sides")
        return metric(name, self.grouped(mask).mean((b - a)[mask]))

    def _column_share(
        self,
        name: str,
        columns: list[FloatArray | None],
        event: Callable[..., BoolArray],
        what: str,
    ) -> Metric:
        present = [column for column in columns if column is not None]
        if len(present) < len(columns):
            return absent(name, f"a run has no {what}")
        mask = np.logical_and.reduce([np.isfinite(column) for column in present])
        if not mask.any():
            return absent(name, f"no row has a {what} on both sides")
        return metric(name, self.grouped(mask).share(event(*(c[mask] for c in present))))

    def _top_metrics(self, changes: TopChanges | None) -> Iterable[Metric]:
        names = [name for name, info in CATALOG.items() if info.section == "top1"]
        if changes is None or not changes.known.any():
            return [absent(name, "a run has no best tokens of its own") for name in names]
        known = changes.known
        tokens = self.grouped(known)
        rows = [
            metric("top1.disagreement", tokens.share((changes.flip | changes.tie_change)[known])),
            metric("flip.all", tokens.share(changes.flip[known])),
            metric("flip.tie", tokens.share(changes.tie_change[known])),
        ]
        if changes.hard is None or changes.near_tie is None:
            reason = "no run states the dtype of its logits"
            rows += [absent(n, reason) for n in ("flip.hard", "flip.near_tie")]
        else:
            rows.append(metric("flip.hard", tokens.share(changes.hard[known])))
            rows.append(metric("flip.near_tie", tokens.share(changes.near_tie[known])))
        rows.append(_excess(tokens, changes))
        return rows


def unequal_rows(pair: AlignedPair) -> BoolArray | None:
    """Rows whose logits differ in some bit: bool [N]; None where a run has a row without a hash."""
    a, b = pair.baseline, pair.candidate
    for run in (a, b):
        if run.has_hash is None or not run.has_hash.all():
            return None
    assert a.logits_hash is not None
    assert b.logits_hash is not None
    # Logprobs too: equal logits with unequal logprobs would be a fault of the statistics.
    different: BoolArray = (a.logits_hash != b.logits_hash) | (a.logprob != b.logprob)
    return different


def lost_rows(pair: AlignedPair) -> BoolArray:
    """Rows that the baseline gives a finite logprob and the candidate does not: bool [N]."""
    lost: BoolArray = ~pair.finite & np.isfinite(pair.baseline.logprob)
    return lost


def _excess(tokens: GroupedTokens, changes: TopChanges) -> Metric:
    if changes.expected is None:
        return absent("flip.excess", str(changes.why_no_expected))
    flips, expected = changes.flip[changes.known], changes.expected[changes.known]
    total = float(expected.sum())
    if total < _MIN_EXPECTED_FLIPS:
        reason = f"needs {_MIN_EXPECTED_FLIPS:.0f} expected flips, noise explains {total:.2g}"
        return absent("flip.excess", reason)
    return metric("flip.excess", tokens.bootstrap_ratio(flips.astype(np.float64), expected))


def _quantile_metrics(
    tokens: GroupedTokens, values: FloatArray, prefix: str, names: tuple[str, ...]
) -> Iterable[Metric]:
    estimates = tokens.quantiles(values, tuple(_QUANTILES[name] for name in names))
    for name, estimate in zip(names, estimates, strict=True):
        scarce = name == "p99_9" and (estimate.effective_n or 0) < _TAIL_TOKENS
        note = f"under {_TAIL_TOKENS:,} effective tokens" if scarce else None
        yield replace(metric(f"{prefix}.{name}", estimate, note=note), not_gated=note)


def _transformed(
    estimate: Estimate, function: Callable[[float], float], *, minimum: float = float("-inf")
) -> Estimate:
    """A monotone increasing function of an estimate; the interval's ends move with it."""
    bounds = clipped(estimate.interval, minimum)
    interval = None
    if bounds is not None:
        low, high = float(function(bounds.low)), float(function(bounds.high))
        interval = Interval(low=low, high=high, method=bounds.method)
    return Estimate(
        value=float(function(estimate.value)),
        interval=interval,
        effective_n=estimate.effective_n,
    )
