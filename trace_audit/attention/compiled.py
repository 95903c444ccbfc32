"""The attention call inside a compiled layer: an operator that the compiler does not look into."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_NUMBER = "trace_audit_layer"


def number_layers(modules: Iterable[torch.nn.Module]) -> None:
    """Let compiled code read the index of each attention module from a tensor.

    An integer attribute would be a constant of the code, and every layer would be compiled anew.
    """
    for module in modules:
        setattr(module, _NUMBER, torch.tensor(int(module.layer_idx)))  # type: ignore[arg-type]


def layer_number(module: torch.nn.Module) -> torch.Tensor:
    """The index of an attention module: int64 [], on the host."""
    number: torch.Tensor = getattr(module, _NUMBER)
    return number


@torch.library.custom_op("trace_audit::attention_of_layer", mutates_args=())
def attention_of_layer(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: torch.Tensor, name: str
) -> torch.Tensor:
    """Attention of one layer, by the engine that is registered with transformers under a name.

    It also writes keys and values to that engine's cache, which no graph holds.

    Args:
        query, key, value: [1, heads, T, head_dim].
        layer: see `layer_number`.
        name: of the `PagedAttention`.

    Returns:
        [1, T, num_heads, value_dim].
    """
    engine = ALL_ATTENTION_FUNCTIONS[name].__self__
    attended: torch.Tensor = engine.attend(int(layer), query, key, value)
    return attended.contiguous()


@attention_of_layer.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: torch.Tensor, name: str
) -> torch.Tensor:
    return nothing_attended(query, value)


def nothing_attended(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Zeros of the shape that attention returns: [1, T, num_heads, value_dim]."""
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
