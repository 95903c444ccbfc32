"""What a KV cache can hold, and what that takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class KVFormat:
    """How the vector of one token and KV head is stored.

    Attributes:
        element_bytes: of each number.
        scale_bytes: of the float32 factor beside the vector; 0: it has none.
    """

    element_bytes: int
    scale_bytes: int = 0

    def bytes_of(self, width: int) -> int:
        """Bytes of a vector of so many numbers."""
        return width * self.element_bytes + self.scale_bytes


KV_FORMATS: Mapping[str, KVFormat] = {
    "float32": KVFormat(element_bytes=4),
    "bfloat16": KVFormat(element_bytes=2),
    "float16": KVFormat(element_bytes=2),
    "fp8_e4m3": KVFormat(element_bytes=1),
    "fp8_e5m2": KVFormat(element_bytes=1),
    "fp8_per_token_head": KVFormat(element_bytes=1, scale_bytes=4),
    "int8": KVFormat(element_bytes=1, scale_bytes=4),
}
"""By the value of `kv_cache_dtype`, "auto" having been decided."""
