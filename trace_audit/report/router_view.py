"""Which layers' routers chose other experts, as text and as a chart."""

from __future__ import annotations

from trace_audit.diff.routing import RouterLayer, RouterSummary
from trace_audit.diff.summary import PairSummary
from trace_audit.report.chart import (
    BOTTOM,
    LEFT,
    RIGHT,
    Chart,
    Mark,
    Tick,
    linear_ticks,
    rounded,
    spread,
    to_y,
)
from trace_audit.report.format import NOT_AVAILABLE, interval, number, sparks
from trace_audit.text import plural

# Few layers make slim bars, not slabs.
_MIN_SLOTS = 12


def router_lines(pair: PairSummary) -> list[tuple[str, str]]:
    """Label and sentence: how many calls differ, and in which layers."""
    router = pair.router
    if router is None:
        return []
    if router.first_layer is None:
        return [("routers", f"the same experts in all {plural(router.calls, 'call')}")]
    of = f"{router.num_chosen} of {router.num_experts}"
    where = (
        f"other experts ({of}) in {router.changed:,} of {plural(router.calls, 'call')}, on "
        f"{plural(router.tokens, 'token')}; the first layer that differs is {router.first_layer}"
    )
    worst = _worst(router)
    shares = sparks([layer.share for layer in router.layers])
    first, last = router.layers[0].layer, router.layers[-1].layer
    by_layer = (
        f"{first} {shares} {last}; largest {number(worst.share, 'share')} "
        f"{interval(worst.interval, 'share')}".rstrip()
        + f" in layer {worst.layer}; a dot is none"
    )
    return [("routers", where), ("routers by layer", by_layer)]


def router_chart(pair: PairSummary) -> Chart | None:
    """Share of the calls of each layer that differ; None where there are none to show."""
    router = pair.router
    if router is None or router.first_layer is None:
        return None
    ticks = linear_ticks(_worst(router).share)
    slot = (RIGHT - LEFT) / max(len(router.layers), _MIN_SLOTS)
    return Chart(
        title="Routers by layer",
        description="Share of tokens at which a layer's router chose other experts.",
        height=BOTTOM + 42,
        x_ticks=spread(
            tuple(
                Tick(at=rounded(LEFT + (i + 0.5) * slot), label=str(layer.layer))
                for i, layer in enumerate(router.layers)
            )
        ),
        y_ticks=tuple(Tick(at=to_y(t, ticks[-1]), label=number(t, "share")) for t in ticks),
        marks=tuple(
            _mark(LEFT + i * slot, slot, layer, ticks[-1]) for i, layer in enumerate(router.layers)
        ),
        headers=("layer", "calls that differ", "95 % interval"),
        rows=tuple(
            (
                str(layer.layer),
                number(layer.share, "share"),
                interval(layer.interval, "share") or NOT_AVAILABLE,
            )
            for layer in router.layers
        ),
        x_title="decoder layer",
    )


def _worst(router: RouterSummary) -> RouterLayer:
    return max(router.layers, key=lambda layer: layer.share)


def _mark(x: float, slot: float, layer: RouterLayer, top: float) -> Mark:
    y = to_y(layer.share, top)
    share = number(layer.share, "share")
    return Mark(
        x=rounded(x + 0.5),
        y=y,
        width=rounded(slot - 1),
        height=rounded(BOTTOM - y),
        css="router",
        title=f"layer {layer.layer}: {share} {interval(layer.interval, 'share')}".rstrip(),
    )
