"""The KV cache's formats as tests need them."""

from __future__ import annotations

import torch

from trace_audit.config.kv_formats import KV_FORMATS
from trace_audit.engine.kv_memory import KV_DTYPES

QUANTIZED = ("fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8")


def storage(name: str) -> tuple[torch.dtype, bool]:
    """What a value of `kv_cache_dtype` stores, and whether with a scale a token and head."""
    return KV_DTYPES[name], KV_FORMATS[name].scale_bytes > 0
