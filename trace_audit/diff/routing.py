"""The routers of two runs' models, as run.json and a report tell of them: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trace_audit.diff.metric import Interval

_NONE = "none"
_OLDER = "it is older than the recording of expert choices"


@dataclass(frozen=True, kw_only=True)
class RunRouting:
    """The routers whose choices a run stores.

    Attributes:
        layers: Decoder layers that have one, ascending.
        num_experts: That a router chooses from.
    """

    layers: tuple[int, ...]
    num_experts: int


@dataclass(frozen=True, kw_only=True)
class RouterLayer:
    """Share of the tokens at which a layer's router chose other experts."""

    layer: int
    share: float
    interval: Interval | None


@dataclass(frozen=True, kw_only=True)
class RouterSummary:
    """Where the routers of two runs chose differently.

    Attributes:
        calls: Router calls that were compared, one a token and layer.
        changed: Those whose sets of experts differ.
        tokens: Tokens with such a call.
        num_experts, num_chosen: That a router chooses from, and how many it chooses.
        layers: A layer with a router each.
        first_layer: First decoder layer with such a call: what differs before it reaches no router.
            None where all chose the same.
    """

    calls: int
    changed: int
    tokens: int
    num_experts: int
    num_chosen: int
    layers: tuple[RouterLayer, ...]
    first_layer: int | None


def run_routing(info: Mapping[str, Any]) -> RunRouting | str | None:
    """The routers whose choices a run stores.

    Args:
        info: Its run.json.

    Returns:
        Why they are not stored, as a clause, where the model has some; None where it has none.
    """
    if "routing" not in info:
        experts = (info.get("backends") or {}).get("experts", _NONE)
        return None if experts == _NONE else _OLDER
    routing = info["routing"]
    if routing is None:
        return None
    if routing["reason"] is not None:
        return str(routing["reason"])
    return RunRouting(layers=tuple(routing["layers"]), num_experts=int(routing["num_experts"]))
