"""What a decode step cannot be faster than: the bytes it must read, and its products alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.measure import timed
from trace_audit.attention.base import LayerSpec
from trace_audit.models.packed_linear import PackedLinear


def weight_bytes(model: Any) -> int:
    """Bytes of weights that a decode step reads: all but an embedding that is not the head too.

    Of such an embedding a step reads one row a sequence; a tied one is read whole, as the head.

    Args:
        model: a dense causal language model of transformers, not packed and not quantized.
    """
    total = sum(parameter.nbytes for parameter in model.parameters())
    embedding = model.get_input_embeddings().weight
    if embedding is model.get_output_embeddings().weight:
        return total
    return total - int(embedding.nbytes)


def kv_bytes(layers: Sequence[LayerSpec], contexts: Sequence[float], kv_cache_dtype: str) -> int:
    """Bytes of keys and values that a decode step reads in all layers.

    Args:
        layers: of the model.
        contexts: tokens of each row.
        kv_cache_dtype: what the cache stores.
    """
    return int(
        sum(
            layer.kv_bytes_per_token(kv_cache_dtype)
            * sum(context if layer.window is None else min(context, layer.window)
                  for context in contexts)
            for layer in layers
        )
    )  # fmt: skip


def linear_seconds(model: Any, rows: int, *, repeats: int = 5) -> float:
    """Seconds of all linear layers of a decode step, one after the other, without what is between.

    Packed layers that read one input are given one, and so are one product, as they are in a step.

    Args:
        model: of transformers, packed or not.
        rows: of a decode step.
        repeats: steps that are timed; the mean counts.
    """
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear | PackedLinear)]
    parameter = next(model.parameters())
    widths = {layer.in_features for layer in layers}
    inputs = {
        width: torch.randn(1, rows, width, device=parameter.device).to(parameter.dtype)
        for width in widths
    }

    def step() -> None:
        for layer in layers:
            layer(inputs[layer.in_features])

    def steps() -> None:
        for _ in range(repeats):
            step()

    with torch.inference_mode():
        step()
        return timed(steps, parameter.device) / repeats
