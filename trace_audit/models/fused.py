"""Decoder layers with merged projections and one kernel between two matrix products.

For models that are made like Llama: pre-norm, rotary embeddings, a gated MLP, and optionally a
norm of query and key heads. Embedding and head stay transformers' own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from transformers.modeling_outputs import BaseModelOutputWithPast

from trace_audit.attention.base import LayerSpec
from trace_audit.attention.paged import PagedAttention
from trace_audit.errors import ConfigError
from trace_audit.kernels import fused, reference
from trace_audit.kernels.few_rows import MAX_ROWS, Norm, few_rows_linear
from trace_audit.kernels.runtime import can_run_triton


class FusedKernels(Protocol):
    """What stands between the products, as Triton kernels or as their references."""

    @property
    def add_rms_norm(self) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """See `trace_audit.kernels.fused.add_rms_norm`."""

    @property
    def norm_and_rotate(self) -> Callable[..., None]:
        """See `trace_audit.kernels.fused.norm_and_rotate`."""

    @property
    def silu_and_multiply(self) -> Callable[..., torch.Tensor]:
        """See `trace_audit.kernels.fused.silu_and_multiply`."""


def fused_layers(device: torch.device) -> str:
    """What run.json calls such layers on a device."""
    return "fused, triton" if _kernels(device) is fused else "fused, reference"


def _kernels(device: torch.device) -> FusedKernels:
    # Interpreted, they would take a hundred times as long as the references.
    return fused if device.type == "cuda" and can_run_triton(device) else reference


_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


def check_fusable(config: Any) -> None:
    """Refuse a model whose layers are made otherwise.

    Raises:
        ConfigError: it is of another type, or has another activation.
    """
    if config.model_type not in _MODEL_TYPES:
        raise ConfigError(
            f"fused = true knows the layers of {', '.join(_MODEL_TYPES)}, and this model is of "
            f"type {config.model_type}",
            hint="use fused = false, or compile = true",
        )
    if config.hidden_act != "silu":
        raise ConfigError(
            f"fused = true computes silu, and this model's hidden_act is {config.hidden_act!r}",
            hint="use fused = false",
        )


class FusedLayer(torch.nn.Module):
    """One decoder layer; its weights replace those it was made of.

    Args:
        layer: transformers' own.
        attention: of the model, probed.
        spec: of this layer.
    """

    def __init__(self, layer: Any, attention: PagedAttention, spec: LayerSpec) -> None:
        super().__init__()
        own = layer.self_attn
        self._attention, self._spec = attention, spec
        self._kernels = _kernels(own.q_proj.weight.device)
        self._index = int(own.layer_idx)
        self.input_norm, self.post_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.query_norm = getattr(own, "q_norm", None)
        self.key_norm = getattr(own, "k_norm", None)
        self.qkv = _merged([own.q_proj, own.k_proj, own.v_proj])
        self.out = own.o_proj
        self.gate_up = _merged([layer.mlp.gate_proj, layer.mlp.up_proj])
        self.down = layer.mlp.down_proj

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer.

        Args:
            hidden: [T, H], what the layer before left to be added.
            residual: [T, H]; None before the first layer.
            cos, sin: [T, head_dim].

        Returns:
            What is to be added next, and the residual stream.
        """
        if len(hidden) <= MAX_ROWS and self._kernels is fused:
            return self._few_rows(hidden, residual, cos, sin)
        add_rms_norm = self._kernels.add_rms_norm
        normalized, residual = add_rms_norm(hidden, residual, *_norm(self.input_norm))
        attended = self._attend(self.qkv(normalized), cos, sin)
        normalized, residual = add_rms_norm(self.out(attended), residual, *_norm(self.post_norm))
        gated = self._kernels.silu_and_multiply(self.gate_up(normalized))
        return self.down(gated), residual

    def _few_rows(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same in half the launches."""
        norm = Norm(residual, *_norm(self.input_norm))
        qkv, residual = few_rows_linear(hidden, self.qkv.weight, self.qkv.bias, norm=norm)
        attended = self._attend(qkv, cos, sin)
        hidden, _ = few_rows_linear(attended, self.out.weight, self.out.bias)
        norm = Norm(residual, *_norm(self.post_norm))
        gated, residual = few_rows_linear(
            hidden, self.gate_up.weight, self.gate_up.bias, norm=norm, gated=True
        )
        return few_rows_linear(gated, self.down.weight, self.down.bias)[0], residual

    def _attend(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        spec, num_tokens = self._spec, len(qkv)
        heads = qkv.view(num_tokens, -1, spec.key_dim)
        query_weight, epsilon = _norm(self.query_norm)
        key_weight, _ = _norm(self.key_norm)
        weights = (query_weight, key_weight)
        target = self._attention.target(self._index, num_tokens)
        self._kernels.norm_and_rotate(
            heads, cos, sin, *weights, spec.num_heads, epsilon, target=target
        )
        if target is not None:
            query = heads[:, : spec.num_heads]
            return self._attention.attend_written(self._index, query).reshape(num_tokens, -1)
        parts = heads.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        query, key, value = (part.transpose(0, 1)[None] for part in parts)
        return self._attention.attend(self._index, query, key, value).reshape(num_tokens, -1)


class FusedDecoder:
    """The decoder's forward; it takes the place of transformers' own.

    Args:
        decoder: transformers' decoder, whose layers are taken out.
        attention: of the model, probed.
    """

    def __init__(self, decoder: Any, attention: PagedAttention) -> None:
        self._decoder = decoder
        self._kernels = _kernels(decoder.norm.weight.device)
        # One after the other: only one layer's weights are there twice.
        for index, spec in enumerate(attention.layers):
            decoder.layers[index] = FusedLayer(decoder.layers[index], attention, spec)

    def __call__(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, **ignored: Any
    ) -> BaseModelOutputWithPast:
        """Ids and positions int64 [1, T] -> hidden states [1, T, H]."""
        decoder = self._decoder
        hidden = decoder.embed_tokens(input_ids)
        cos, sin = (x[0].contiguous() for x in decoder.rotary_emb(hidden, position_ids))
        flat, residual = hidden[0], None
        for layer in decoder.layers:
            flat, residual = layer(flat, residual, cos, sin)
        normalized, _ = self._kernels.add_rms_norm(flat, residual, *_norm(decoder.norm))
        return BaseModelOutputWithPast(last_hidden_state=normalized[None])


def fuse_layers(model: Any, attention: PagedAttention) -> None:
    """Replace a model's decoder layers, in place.

    Args:
        model: whole, on its device, in eval mode.
        attention: of the model, probed.

    Raises:
        ConfigError: see `check_fusable`.
    """
    check_fusable(model.config)
    decoder = model.get_decoder()
    decoder.forward = FusedDecoder(decoder, attention)


def _norm(module: Any) -> tuple[Any, float]:
    """A norm's weight and epsilon; None and 0 where there is no norm."""
    return (None, 0.0) if module is None else (module.weight, float(module.variance_epsilon))


def _merged(projections: Sequence[Any]) -> torch.nn.Linear:
    """Linear layers of one input as one, their outputs one after the other."""
    weight = torch.cat([p.weight for p in projections])
    biases = [p.bias for p in projections if p.bias is not None]
    assert len(biases) in (0, len(projections))
    num_out, num_in = weight.shape
    merged = torch.nn.Linear(num_in, num_out, bias=bool(biases), device="meta")
    merged.weight = _frozen(weight)
    if biases:
        merged.bias = _frozen(torch.cat(biases))
    return merged


def _frozen(values: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(values.detach(), requires_grad=False)
