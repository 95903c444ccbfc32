"""Which experts a model's routers choose: read off the call that computes the experts.

Every mixture of experts of transformers hands its experts the chosen ids, whatever its router does
to get them, so that call is where they are looked at. Nothing that is computed depends on it.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch

_NUMBER = "trace_audit_layer"


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The routers of a whole model.

    Attributes:
        layers: indices of the decoder layers that have one, ascending.
        num_experts: that a router chooses from.
        reason: why their choices are not recorded; None if they are.
    """

    layers: tuple[int, ...]
    num_experts: int
    reason: str | None = None


def routing_of(model: torch.nn.Module) -> Routing | None:
    """The routers of a model; None where it has none.

    Args:
        model: whole; its parameters may be without data.
    """
    found = _experts(model)
    if not found:
        return None
    layers = [layer for layer, _ in found]
    counts = {_num_experts(module) for _, module in found}
    reason = None
    if not all(_takes_choices(module) for _, module in found):
        reason = "the model's experts are not told which of them were chosen"
    elif len(set(layers)) < len(layers) or -1 in layers:
        reason = "the model has not one router in a layer"
    elif len(counts) > 1 or len(_chosen(model)) > 1:
        reason = "the model's routers do not all choose as many of as many experts"
    return Routing(layers=tuple(sorted(set(layers))), num_experts=max(counts), reason=reason)


class ExpertChoices:
    """What the routers of a model, or of one rank's layers, chose in its last forward.

    Args:
        modules: experts by the index of their decoder layer.
        num_experts: that a router chooses from.
    """

    _numbers = itertools.count()

    def __init__(self, modules: Mapping[int, torch.nn.Module], num_experts: int) -> None:
        self.name = f"experts_{next(self._numbers)}"
        self._layers = sorted(modules)
        self._dtype = torch.uint8 if num_experts <= 256 else torch.int16
        self._chosen: dict[int, torch.Tensor] = {}
        self._together: torch.Tensor | None = None
        _OPEN[self.name] = self
        for layer, module in modules.items():
            # An integer attribute would be a constant of compiled code, one graph a layer.
            setattr(module, _NUMBER, torch.tensor(layer))
            module.register_forward_pre_hook(self._look)

    def of(self, rows: torch.Tensor | None) -> torch.Tensor | None:
        """The experts of some tokens of the last forward, without waiting for the device.

        Args:
            rows: int64 [B], tokens of its flat batch; None: all of them.

        Returns:
            uint8 or int16 [B, L, k], of each of the L layers in order the ids of the experts,
            ascending; None where this rank has no such layer.
        """
        if not self._layers:
            return None
        if self._together is None:
            chosen = [self._chosen[layer] for layer in self._layers]
            self._together = torch.stack(chosen, dim=1).to(self._dtype)
        together = self._together if rows is None else self._together[rows]
        return together.sort(-1).values

    def note(self, layer: int, expert_ids: torch.Tensor) -> None:
        """Keep what a layer's router chose: int64 [T, k], not written to from now on."""
        self._chosen[layer] = expert_ids
        self._together = None

    def _look(self, module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Called with the experts' arguments before they are computed."""
        hidden, expert_ids, *rest = args
        number = getattr(module, _NUMBER)
        if torch.compiler.is_compiling():
            return (hidden, note_experts(expert_ids, number, self.name), *rest)
        self.note(int(number), expert_ids)
        return None


def capture_choices(model: torch.nn.Module, routing: Routing | None) -> ExpertChoices | None:
    """Look at the experts that this rank has; None where nothing is recorded.

    Args:
        model: whole or a rank's share of it, as it is going to run.
        routing: of the whole model.
    """
    if routing is None or routing.reason is not None:
        return None
    return ExpertChoices(dict(_experts(model)), routing.num_experts)


# Compiled code can hold a name and no object, as it does of the attention.
_OPEN: WeakValueDictionary[str, ExpertChoices] = WeakValueDictionary()


@torch.library.custom_op("trace_audit::note_experts", mutates_args=())
def note_experts(expert_ids: torch.Tensor, layer: torch.Tensor, name: str) -> torch.Tensor:
    """Note what a compiled layer's router chose.

    Args:
        expert_ids: int64 [T, k].
        layer: int64 [] on the host, index of the decoder layer.
        name: of the `ExpertChoices`.

    Returns:
        A copy, so that the graph needs this call.
    """
    # Two copies: the graph may write over its own.
    _OPEN[name].note(int(layer), expert_ids.clone())
    return expert_ids.clone()


@note_experts.register_fake
def _(expert_ids: torch.Tensor, layer: torch.Tensor, name: str) -> torch.Tensor:
    return torch.empty_like(expert_ids)


def _experts(model: torch.nn.Module) -> list[tuple[int, torch.nn.Module]]:
    """Index of the decoder layer, -1 where the name has none, and its experts, in order."""
    return [
        (next((int(part) for part in name.split(".") if part.isdigit()), -1), module)
        for name, module in model.named_modules()
        if type(module).__name__.endswith("Experts")
    ]


def _num_experts(module: torch.nn.Module) -> int:
    count = getattr(module, "num_experts", None)
    return count if isinstance(count, int) else max(int(p.shape[0]) for p in module.parameters())


def _chosen(model: torch.nn.Module) -> set[int]:
    """How many experts a call gets, as modules say it that know."""
    found = (getattr(module, "top_k", None) for module in model.modules())
    return {top_k for top_k in found if isinstance(top_k, int)}


def _takes_choices(module: torch.nn.Module) -> bool:
    """Whether its arguments are states, chosen ids and their weights."""
    return len(inspect.signature(type(module).forward).parameters) >= 4
