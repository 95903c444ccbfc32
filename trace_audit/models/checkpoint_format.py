"""Checkpoints that were quantized elsewhere and say so in config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedConfig

from trace_audit.errors import ModelError, TraceAuditError

_DETAILS = ("bits", "group_size", "fmt", "format", "weight_block_size")


def checkpoint_format(config: PreTrainedConfig) -> str | None:
    """How a checkpoint says that it is quantized, in a few words; None for a plain one."""
    given = getattr(config, "quantization_config", None)
    if given is None:
        return None
    values: Mapping[str, Any] = given if isinstance(given, Mapping) else given.to_dict()
    method = getattr(values.get("quant_method"), "value", values.get("quant_method"))
    kind = values.get("quant_type")
    details = [str(kind)] if isinstance(kind, str) else []
    if isinstance(kind, Mapping):  # torchao: {"default": {"_type": name, "_data": {...}}}
        default = kind.get("default", kind)
        details = [str(default.get("_type", "mixed"))]
    details += [f"{name} {values[name]}" for name in _DETAILS if values.get(name) is not None]
    return " ".join([str(method), *(f"({', '.join(details)})",) * bool(details)])


@contextmanager
def running(checkpoint: str | None, dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Around the first forward: a quantized checkpoint whose library fails there is refused.

    Args:
        checkpoint: see `checkpoint_format`.
        dtype, device: of the run.

    Raises:
        ModelError: the layers cannot be computed so.
    """
    try:
        yield
    except TraceAuditError:
        raise
    except Exception as error:  # whatever a library of its own raises
        if checkpoint is None:
            raise
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelError(
            f"the layers of this checkpoint, {checkpoint}, cannot be computed in "
            f"{str(dtype).removeprefix('torch.')} on {device.type}: {first}",
            hint="try the dtype and the device that it was made for",
        ) from error


def library_hint(checkpoint: str | None) -> str | None:
    """What to do where transformers cannot read a checkpoint; None for a plain one."""
    if checkpoint is None:
        return None
    extra = "the extra `quantization`" if checkpoint.startswith("torchao") else "its library"
    return f"the checkpoint is quantized, {checkpoint}: install {extra}, or use a plain one"
