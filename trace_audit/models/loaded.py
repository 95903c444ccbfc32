"""A model as the engine takes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trace_audit.attention.base import LayerSpec
from trace_audit.attention.paged import Forward, PagedAttention
from trace_audit.models.quantization import NOT_QUANTIZED, Quantized
from trace_audit.models.routing import ExpertChoices, Routing
from trace_audit.parallel.plan import kv_heads_of


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model ready for the engine.

    Attributes:
        model: in eval mode, its attention routed to `attention`.
        attention: the paged attention, probed.
        vocabulary_size: width of the logits.
        eos_token_ids: from the generation config, else the config.
        linear: what the linear layers run as: "torch", "onednn-packed", or an fp8 product.
        forward: runs a flat batch through the layers that this rank has.
        weights: how they were read: "whole" or "sliced".
        experts: what a mixture of experts runs as; "none" where there is none.
        quantized: what was done to the linear layers.
        checkpoint: how the checkpoint was quantized before; None for a plain one.
        compiled: whether the decoder layers are compiled.
        fused: whether they are this engine's own.
        routing: the whole model's routers; None where it has none.
        choices: what those of this rank's layers choose; None where that is not recorded.
    """

    model: torch.nn.Module
    attention: PagedAttention
    vocabulary_size: int
    eos_token_ids: frozenset[int]
    linear: str
    forward: Forward
    weights: str
    experts: str
    quantized: Quantized = NOT_QUANTIZED
    checkpoint: str | None = None
    compiled: bool = False
    fused: bool = False
    routing: Routing | None = None
    choices: ExpertChoices | None = None

    @property
    def layers(self) -> list[LayerSpec]:
        """Attention shapes of each layer."""
        return self.attention.layers

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads in a layer of the whole model, however few of them a rank has."""
        return kv_heads_of(self.model.config.get_text_config())  # type: ignore[operator,union-attr]
