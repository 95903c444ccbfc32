"""Token metrics of a pair of runs, each with its interval or the reason why it cannot be had."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from trace_audit.diff.agreement import ExactCheck
from trace_audit.diff.align import AlignedPair
from trace_audit.diff.bootstrap import Resampler
from trace_audit.diff.catalog import CATALOG, absent, metric
from trace_audit.diff.columns import FloatArray
from trace_audit.diff.distribution_means import DRIFTS
from trace_audit.diff.estimators import Estimate, Estimator, GroupedTokens, num_groups
from trace_audit.diff.exact_kl import NOT_ASKED, ExactKL, exact_metrics
from trace_audit.diff.flips import TopChanges
from trace_audit.diff.intervals import clipped
from trace_audit.diff.kl_metrics import kl_metrics, why_not_sampled
from trace_audit.diff.rl import rl_metrics
from trace_audit.diff.router_metrics import router_metrics
from trace_audit.diff.summary import Interval, Metric

BoolArray = NDArray[np.bool_]

_MIN_EXPECTED_FLIPS = 5.0
_TAIL_TOKENS = 10_000
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99_9": 0.999}


class MetricTable:
    """Computes the table of one pair.

    Attributes:
        sizes: |delta| of the finite rows.
        design_effect: Of mean |delta|; None with one group or no finite row.
        effective_n: Finite rows over the design effect.
    """

    def __init__(self, pair: AlignedPair, resampler: Resampler) -> None:
        """Measures a pair; the resampler draws from its groups."""
        self.pair = pair
        self._resampler = resampler
        self.design_effect: float | None = None
        self.effective_n: float | None = None
        self.sizes = self.grouped(pair.finite).moments(pair.finite_values(pair.delta), np.abs)
        if num_groups(self.sizes) > 1:
            self.design_effect = self._estimator().effect(self.sizes)
            self.effective_n = self.sizes.size / self.design_effect

    def metrics(
        self,
        changes: TopChanges | None,
        *,
        excess_refused: str | None = "the dtypes of the runs are not known",
        exact: ExactKL | str = NOT_ASKED,
        check: ExactCheck | None = None,
    ) -> tuple[Metric, ...]:
        """Every metric of the catalog, in its order; those of routers where there are any.

        Args:
            changes: Changes of the best token, where they are known.
            excess_refused: Why `kl.excess` has no meaning here; None if it has one.
            exact: The exact KL, or why it cannot be had.
            check: What it says of the estimate; None without one.
        """
        if not self.pair.finite.any():
            reason = "every candidate logprob is non-finite"
            if not self.pair.lost.all():
                reason = "no token has a finite logprob on both sides"
            return tuple(
                absent(name, reason)
                for name, info in CATALOG.items()
                if info.section != "router" or self.pair.router is not None
            )
        rows = [
            *self._delta_metrics(),
            *self._probability_metrics(),
            *kl_metrics(self.pair, self.grouped, self._estimator(), excess_refused=excess_refused),
            *exact_metrics(self.grouped, len(self.pair), exact, check),
            *self._distribution_metrics(),
            *self._top_metrics(changes),
            *router_metrics(self.pair, self.grouped, self._estimator()),
            *rl_metrics(self.pair, self.grouped, why_not_sampled(self.pair)),
        ]
        order = list(CATALOG)
        return tuple(sorted(rows, key=lambda row: order.index(row.name)))

    def grouped(self, mask: BoolArray) -> GroupedTokens:
        """The groups of some rows (mask bool [N])."""
        effect = 1.0 if self.design_effect is None else self.design_effect
        group = self.pair.group if mask.all() else self.pair.group[mask]
        return GroupedTokens(group, self._resampler, design_effect=effect)

    def _estimator(self) -> Estimator:
        effect = 1.0 if self.design_effect is None else self.design_effect
        return Estimator(self._resampler, design_effect=effect)

    def _delta_metrics(self) -> Iterable[Metric]:
        tokens = self.grouped(self.pair.finite)
        delta = self.pair.finite_values(self.pair.delta)
        largest = max(abs(float(delta.min())), abs(float(delta.max())))
        yield metric("delta.mean", tokens.mean(delta))
        yield metric("abs.mean", self._estimator().mean(self.sizes))
        yield metric("delta.rms", _transformed(tokens.mean(delta, np.square), np.sqrt, minimum=0.0))
        yield from _quantile_metrics(tokens, delta, "abs", tuple(_QUANTILES))
        yield metric("abs.max", Estimate(value=largest), note="grows with the tokens")
        yield metric("delta.equal", tokens.share(delta, lambda some: some == 0))
        yield self._unequal_rows()

    def _unequal_rows(self) -> Metric:
        unequal = self.pair.unequal
        if unequal is None:
            return absent("rows.unequal", "a run has no logits hash")
        everywhere = np.ones(len(self.pair), dtype=np.bool_)
        return metric("rows.unequal", self.grouped(everywhere).share(unequal))

    def _probability_metrics(self) -> Iterable[Metric]:
        pair = self.pair
        tokens = self.grouped(pair.finite)
        delta = pair.finite_values(pair.delta)
        yield metric("tme", tokens.mean(delta, lambda some: np.exp(np.abs(some))))
        yield metric("ratio.outside", tokens.share(delta, _ratio_is_outside))
        yield metric("ppl.ratio", _transformed(tokens.mean(delta, np.negative), np.exp))
        baseline = pair.finite_values(pair.baseline_stored)
        candidate = pair.finite_values(pair.candidate_stored)
        yield metric("ppl.baseline", _transformed(tokens.mean(baseline, _negative_double), np.exp))
        yield metric(
            "ppl.candidate", _transformed(tokens.mean(candidate, _negative_double), np.exp)
        )
        change = np.exp(candidate, dtype=np.float64)
        change -= np.exp(baseline, dtype=np.float64)
        yield metric("dp.rms", _transformed(tokens.mean(change, np.square), np.sqrt, minimum=0.0))
        yield from _quantile_metrics(tokens, change, "dp", ("p50", "p99"))

    def _distribution_metrics(self) -> Iterable[Metric]:
        found, estimator = self.pair.means.found, self._estimator()
        for name, (_, what) in DRIFTS.items():
            moments = found[name]
            if moments is None:
                yield absent(name, f"a run has no {what}")
            elif not moments.size:
                yield absent(name, f"no row has a finite {what} on both sides")
            else:
                yield metric(name, estimator.mean(moments))
        shares = {"rank.changed": "rank", "ties.baseline": "tie count"}
        for name, what in {**shares, "ties.candidate": "tie count"}.items():
            moments = found[name]
            if moments is None:
                yield absent(name, f"a run has no {what}")
            elif not moments.size:
                yield absent(name, f"no row has a {what} on both sides")
            else:
                yield metric(name, estimator.share(moments))

    def _top_metrics(self, changes: TopChanges | None) -> Iterable[Metric]:
        names = [name for name, info in CATALOG.items() if info.section == "top1"]
        if changes is None or not changes.known.any():
            return [absent(name, "a run has no best tokens of its own") for name in names]
        known = changes.known
        tokens = self.grouped(known)

        def share(name: str, events: BoolArray) -> Metric:
            return metric(name, tokens.share(events if known.all() else events[known]))

        rows = [
            share("top1.disagreement", changes.flip | changes.tie_change),
            share("flip.all", changes.flip),
            share("flip.tie", changes.tie_change),
        ]
        near_tie = changes.near_tie
        if changes.hard is None or near_tie is None:
            reason = "no run states the dtype of its logits"
            rows += [absent(n, reason) for n in ("flip.hard", "flip.near_tie")]
        else:
            rows += [share("flip.hard", changes.hard), share("flip.near_tie", near_tie)]
        rows.append(_excess(tokens, changes))
        return rows


def _excess(tokens: GroupedTokens, changes: TopChanges) -> Metric:
    if changes.expected is None:
        return absent("flip.excess", str(changes.why_no_expected))
    flips, expected = changes.flip, changes.expected
    if not changes.known.all():
        flips, expected = flips[changes.known], expected[changes.known]
    total = float(expected.sum())
    if total < _MIN_EXPECTED_FLIPS:
        reason = f"needs {_MIN_EXPECTED_FLIPS:.0f} expected flips, noise explains {total:.2g}"
        return absent("flip.excess", reason)
    return metric("flip.excess", tokens.bootstrap_ratio(flips, expected))


def _quantile_metrics(
    tokens: GroupedTokens, values: FloatArray, prefix: str, names: tuple[str, ...]
) -> Iterable[Metric]:
    estimates = tokens.abs_quantiles(values, tuple(_QUANTILES[name] for name in names))
    for name, estimate in zip(names, estimates, strict=True):
        scarce = name == "p99_9" and (estimate.effective_n or 0) < _TAIL_TOKENS
        note = f"under {_TAIL_TOKENS:,} effective tokens" if scarce else None
        yield replace(metric(f"{prefix}.{name}", estimate, note=note), not_gated=note)


def _ratio_is_outside(delta: FloatArray) -> BoolArray:
    """Of the candidate's probability to the baseline's: outside 0.9 to 1.1."""
    ratio = np.exp(delta)
    return (ratio < 0.9) | (ratio > 1.1)


def _negative_double(values: NDArray[np.float32]) -> FloatArray:
    return np.negative(values, dtype=np.float64)


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
