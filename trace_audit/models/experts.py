"""How a mixture of experts is computed: by one of transformers' own implementations."""

from __future__ import annotations

from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from trace_audit.errors import ConfigError

_ALIGNMENT = 16  # bytes that grouped_mm wants rows to start at
_EXPERT_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


def apply_moe_backend(config: PreTrainedConfig, moe_backend: str) -> None:
    """Make models of this config compute their experts so; "auto" leaves transformers its choice.

    Raises:
        ConfigError: there is nothing to choose, the model having no experts.
    """
    if moe_backend == "auto" or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not model_class._can_set_experts_implementation():
        raise ConfigError(
            f'moe_backend = "{moe_backend}" chooses how experts are computed, and '
            f"{model_class.__name__} has none",
            hint='leave moe_backend at "auto"',
        )
    config._experts_implementation = moe_backend


def experts_backend(model: Any) -> str:
    """What the model's experts run as; "none" where it has none."""
    if not type(model)._can_set_experts_implementation():
        return "none"
    return str(model.config.get_text_config()._experts_implementation)


def check_expert_widths(model: Any) -> None:
    """Refuse experts that grouped_mm cannot multiply.

    Args:
        model: whole, or a rank's share, whose experts are narrower.

    Raises:
        ConfigError: rows of a weight do not start at multiples of 16 bytes.
    """
    if experts_backend(model) != "grouped_mm":
        return
    for name, weight in model.named_parameters():
        if weight.dim() != 3 or name.rpartition(".")[2] not in _EXPERT_WEIGHTS:
            continue
        if any(width * weight.element_size() % _ALIGNMENT for width in weight.shape[1:]):
            _, rows, columns = weight.shape
            raise ConfigError(
                f"moe_backend grouped_mm needs experts whose widths are multiples of "
                f"{_ALIGNMENT} bytes, and {name} is {rows} x {columns} on this rank",
                hint='use moe_backend = "eager" or "batched_mm"',
            )
