"""How often routers chose other experts, and how |delta| splits by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from trace_audit.diff.align import AlignedPair
from trace_audit.diff.bootstrap import Resampler
from trace_audit.diff.catalog import absent, metric
from trace_audit.diff.catalog_router import ROUTER
from trace_audit.diff.estimators import Estimator, GroupedTokens
from trace_audit.diff.intervals import clipped
from trace_audit.diff.metric import Metric
from trace_audit.diff.router_totals import RouterTotals
from trace_audit.diff.routing import RouterLayer, RouterSummary

Grouped = Callable[[NDArray[np.bool_]], GroupedTokens]


def router_metrics(pair: AlignedPair, grouped: Grouped, estimator: Estimator) -> Iterable[Metric]:
    """The section "router" of the table; nothing where neither model has routers.

    Args:
        pair: The aligned runs, with at least one finite row.
        grouped: Groups of some of its rows.
        estimator: Of moments over its groups.
    """
    totals = pair.router
    if totals is None:
        return
    if isinstance(totals, str):
        yield from (absent(name, totals) for name in ROUTER)
        return
    everywhere = np.ones(len(pair), dtype=np.bool_)
    tokens = grouped(everywhere)
    # A token's calls share its hidden states, so the token counts, and its value is a share.
    calls = tokens.moments(totals.changed / len(totals.routing.layers))
    yield metric("router.disagreement", estimator.share(calls))
    yield metric("router.replaced", estimator.share(totals.replaced))
    yield metric("router.tokens", tokens.share(totals.changed > 0))
    yield from _split(pair, totals, grouped)


def _split(pair: AlignedPair, totals: RouterTotals, grouped: Grouped) -> Iterable[Metric]:
    changed = totals.changed > 0
    size = np.abs(pair.delta)
    for name, rows, what in (
        ("router.abs_changed", pair.finite & changed, "some"),
        ("router.abs_same", pair.finite & ~changed, "none"),
    ):
        if rows.any():
            estimate = grouped(rows).mean(size[rows])
            yield metric(name, replace(estimate, interval=clipped(estimate.interval, 0.0)))
        else:
            yield absent(name, f"no token has {what} of its router calls changed")
    finite = pair.finite_values(size)
    if not finite.any():
        yield absent("router.abs_share", "every |delta| is 0")
        return
    part = np.where(changed[pair.finite], finite, 0.0)
    estimate = grouped(pair.finite).ratio(part, finite)
    bounds = clipped(estimate.interval, 0.0, 1.0)
    yield metric("router.abs_share", replace(estimate, interval=bounds))


def router_summary(
    pair: AlignedPair, resampler: Resampler, design_effect: float | None
) -> RouterSummary | None:
    """The choices by layer; None where they cannot be compared.

    Args:
        pair: The aligned runs.
        resampler: Draws from its groups.
        design_effect: Of mean |delta|; None with one group.
    """
    totals = pair.router
    if not isinstance(totals, RouterTotals):
        return None
    estimator = Estimator(resampler, design_effect=design_effect or 1.0)
    layers = totals.routing.layers
    estimates = [estimator.share(moments) for moments in totals.by_layer]
    differing = [layer for layer, e in zip(layers, estimates, strict=True) if e.value > 0]
    return RouterSummary(
        calls=len(pair) * len(layers),
        changed=int(totals.changed.sum()),
        tokens=int(np.count_nonzero(totals.changed)),
        num_experts=totals.routing.num_experts,
        num_chosen=totals.num_chosen,
        layers=tuple(
            RouterLayer(layer=layer, share=estimate.value, interval=estimate.interval)
            for layer, estimate in zip(layers, estimates, strict=True)
        ),
        first_layer=min(differing, default=None),
    )
