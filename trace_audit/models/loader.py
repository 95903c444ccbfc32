"""From a model directory, or a model in memory, to what the engine runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trace_audit.attention.paged import Forward, PagedAttention
from trace_audit.models.checkpoint_format import checkpoint_format, running
from trace_audit.models.compiled import compile_layers
from trace_audit.models.experts import apply_moe_backend, check_expert_widths, experts_backend
from trace_audit.models.fused import fuse_layers
from trace_audit.models.loaded import LoadedModel
from trace_audit.models.packed_linear import can_pack, pack_linears
from trace_audit.models.pretrained import (
    check_weights_present,
    eos_token_ids,
    from_pretrained,
    num_layers,
    read_config,
)
from trace_audit.models.quantization import Quantized, quantize
from trace_audit.models.routing import capture_choices, routing_of

_ALIGNMENT = 64  # bytes, of what torch allocates on a CPU


def load_model(
    directory: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    lm_head_dtype: torch.dtype,
    moe_backend: str = "auto",
    quantization: str = "none",
    compiled: bool = False,
    fused: bool = False,
) -> LoadedModel:
    """Load weights from safetensors and probe the attention of every layer.

    Args:
        directory: config.json and *.safetensors.
        dtype: of weights, activations and the KV cache.
        device: where the model lives.
        lm_head_dtype: of the logits product; the head's weights are converted if it differs.
        moe_backend: see `apply_moe_backend`.
        quantization: see `quantize`.
        compiled: whether to compile the decoder layers.
        fused: whether to replace them, see `fuse_layers`.

    Raises:
        ModelError: see `read_config`; no safetensors, weights that do not match the config, or a
            model that cannot be compiled.
        ConfigError: the experts cannot be computed so, or the layers not quantized so.
    """
    config = read_config(directory)
    apply_moe_backend(config, moe_backend)
    check_weights_present(directory)
    checkpoint = checkpoint_format(config)
    attention = PagedAttention()
    try:
        return ready_model(
            from_pretrained(directory, config, dtype, attention.name),
            attention,
            dtype=dtype,
            device=device,
            lm_head_dtype=lm_head_dtype,
            quantization=quantization,
            compiled=compiled,
            fused=fused,
            eos_token_ids=eos_token_ids(directory, config.get_text_config()),
            checkpoint=checkpoint,
        )
    except BaseException:
        attention.close()
        raise


def ready_model(
    model: Any,
    attention: PagedAttention,
    *,
    dtype: torch.dtype,
    device: torch.device,
    lm_head_dtype: torch.dtype,
    quantization: str = "none",
    compiled: bool = False,
    fused: bool = False,
    eos_token_ids: frozenset[int] = frozenset(),
    checkpoint: str | None = None,
) -> LoadedModel:
    """Make a whole model in memory ready for the engine.

    Args:
        model: of transformers, in `dtype`; its attention implementation is `attention.name`.
        attention: still without layers.
        dtype, device, lm_head_dtype, quantization, compiled, fused: see `load_model`.
        eos_token_ids: see `LoadedModel`.
        checkpoint: how its checkpoint was quantized, if it was.

    Raises:
        ModelError, ConfigError: see `load_model`.
    """
    check_expert_widths(model)
    model = model.to(device).eval()
    align_parameters(model)
    head_dtype_applied(model, lm_head_dtype)
    vocabulary_size = int(model.get_output_embeddings().weight.shape[0])
    quantized = quantize(model, quantization)
    routing = routing_of(model)
    choices = capture_choices(model, routing)
    forward = causal_forward(model, has_head=True)
    with running(checkpoint, dtype, device):
        attention.probe(model, range(num_layers(model.config)), forward)
    if fused:
        fuse_layers(model, attention)
    linear = linears_packed(model, device, dtype, quantized, merge=not compiled, own_rounding=fused)
    if compiled:
        compile_layers(model, attention, forward)
    return LoadedModel(
        model=model,
        attention=attention,
        vocabulary_size=vocabulary_size,
        eos_token_ids=eos_token_ids,
        linear=linear,
        forward=forward,
        weights="whole",
        experts=experts_backend(model),
        quantized=quantized,
        checkpoint=checkpoint,
        compiled=compiled,
        fused=fused,
        routing=routing,
        choices=choices,
    )


def align_parameters(model: torch.nn.Module) -> None:
    """Move parameters on a CPU to addresses as torch allocates them.

    They may lie in the mapped weights file, at whatever offset its header left them, and MKL sums a
    product of a single row by its operands' addresses.
    """
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and parameter.data_ptr() % _ALIGNMENT:
            parameter.data = parameter.data.clone()


def causal_forward(model: Any, *, has_head: bool) -> Forward:
    """The forward of a causal language model, or of its decoder where the head is elsewhere."""

    def forward(
        input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None
    ) -> torch.Tensor | None:
        inputs = {
            "input_ids": input_ids[None],
            "position_ids": positions[None],
            "use_cache": False,
        }
        if not has_head:
            model.get_decoder()(**inputs)
            return None
        # To keep 0 is to keep all.
        logits: torch.Tensor = model(**inputs, logits_to_keep=0 if rows is None else rows).logits[0]
        return logits

    return forward


def linears_packed(
    model: torch.nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    quantized: Quantized,
    *,
    merge: bool = True,
    own_rounding: bool = False,
) -> str:
    """Pack the linear layers that oneDNN would run; returns what all of them run as.

    Args:
        model: on its device.
        device, dtype: its own.
        quantized: what of its layers was quantized.
        merge: see `pack_linears`.
        own_rounding: see `can_pack`.
    """
    packs = can_pack(device, dtype, own_rounding=own_rounding)
    packed = packs and pack_linears(model, dtype, merge=merge) > 0
    if quantized.products is not None:
        return quantized.products + (", head onednn-packed" if packed else "")
    return "onednn-packed" if packed else "torch"


def head_dtype_applied(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Make the model compute its logits in `dtype`, with a head of its own if that differs."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    if head.weight.dtype == dtype:
        return
    cast = _CastingHead(head, dtype)
    model.set_output_embeddings(cast)  # type: ignore[operator]


class _CastingHead(torch.nn.Module):
    """A linear head in another dtype than the activations it is given."""

    def __init__(self, head: torch.nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        # A copy: a tied embedding keeps its own dtype.
        self.weight = torch.nn.Parameter(head.weight.detach().to(dtype), requires_grad=False)
        bias = None if head.bias is None else head.bias.detach().to(dtype)
        self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias)
