"""Refusing what cannot be quantized, before any weights are read."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig

from trace_audit.errors import ConfigError
from trace_audit.models.checkpoint_format import checkpoint_format
from trace_audit.models.quantization import int4_group, quantized_linears
from trace_audit.models.split import empty_model


def check_quantization(config: PreTrainedConfig, quantization: str) -> None:
    """Check that every matrix of a model can be quantized as configured.

    Args:
        config: of the model.
        quantization: as in the configuration.

    Raises:
        ConfigError: the checkpoint is quantized already, a matrix is neither a linear layer's nor
            an embedding's, or a width has no group size.
    """
    if quantization == "none":
        return
    already = checkpoint_format(config)
    if already is not None:
        raise ConfigError(
            f'quantization = "{quantization}", and the checkpoint is quantized already ({already})',
            hint='use quantization = "none": the checkpoint is run as it is',
        )
    model = empty_model(config, torch.float32, "eager")
    _check_matrices(model, quantization)
    if quantization == "int4_weight_only":
        for module, name in quantized_linears(model):
            int4_group(getattr(module, name).in_features)


def _check_matrices(model: Any, quantization: str) -> None:
    plain = (torch.nn.Linear, torch.nn.Embedding)
    for name, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1 and type(module) not in plain:
                raise ConfigError(
                    f'quantization = "{quantization}" rounds the weights of linear layers, and '
                    f"{name}.{kind} belongs to a {type(module).__name__}",
                    hint="models with experts or with layers of their own kind run unquantized, "
                    "or as checkpoints that were quantized elsewhere (--model)",
                )
