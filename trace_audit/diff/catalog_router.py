"""Definitions of the metrics of routers: which experts were chosen."""

from __future__ import annotations

from functools import partial

from trace_audit.diff.metric_info import MetricInfo

_router = partial(
    MetricInfo,
    section="router",
    unit="share",
    source="diff/router_metrics.py",
    valid="both runs store expert choices of the same routers; no row where neither has routers",
)
_SPLIT = "as router.disagreement"

ROUTER: dict[str, MetricInfo] = {
    "router.disagreement": _router(
        label="router calls that differ",
        formula="share of (token, layer) router calls whose sets of experts differ",
        reads="0: every token went to the same experts, whatever their weights",
    ),
    "router.replaced": _router(
        label="  experts replaced",
        formula="mean over router calls of |experts_A without experts_B| / k, k chosen a call",
        reads="how much of the choice differs: 1 of 8 experts is less than all of them",
        valid=_SPLIT,
    ),
    "router.tokens": _router(
        label="tokens with such a call",
        formula="share of tokens with a call that differs in any layer",
        reads="near 1 in a deep model even where few calls differ",
        valid=_SPLIT,
    ),
    "router.abs_changed": _router(
        unit="nats",
        label="mean |delta| of these tokens",
        formula="mean |delta| over tokens with a call that differs",
        reads="against router.abs_same: whether other experts go with larger deltas",
        valid=f"{_SPLIT}, and there are such tokens",
        neutral=None,
        not_gated="it is of few tokens where the runs are close; gate on router.disagreement",
    ),
    "router.abs_same": _router(
        unit="nats",
        label="mean |delta| of the others",
        formula="mean |delta| over tokens all of whose calls are the same",
        reads="what differs without any router at this position",
        valid=f"{_SPLIT}, and there are such tokens",
        neutral=None,
        not_gated="it leaves out what routers do; gate on abs.mean",
    ),
    "router.abs_share": _router(
        label="their part of the summed |delta|",
        formula="sum |delta| over tokens with a call that differs / sum |delta|",
        reads="against router.tokens: over it, other experts go with larger deltas",
        valid=f"{_SPLIT}, and something differs",
        neutral=None,
        not_gated="it is a part, not a size; gate on router.disagreement",
    ),
}
