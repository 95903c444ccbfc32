"""How many rows a decode launch has: on a GPU, and under `fixed_batch`, more than it has requests.

The number of rows decides which kernels a library takes and so the last bits of every row. It is
the schedule's affair, the same whatever computes the launch: a recorded one, an eager one, another
attention backend, several ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from trace_audit.config import EngineConfig
from trace_audit.engine.fixed_batch import num_decode_rows

DecodePadding: TypeAlias = Callable[[int], int]
"""From the requests of a decode launch to its rows."""

_PAD_FROM = 8


def decode_padding(config: EngineConfig, device: torch.device) -> DecodePadding:
    """The padding of a run.

    Args:
        config: resolved.
        device: where it computes; on a CPU a row of padding costs as much as a real one.
    """
    if config.fixed_batch:
        rows = num_decode_rows(config.max_num_seqs)
        return lambda num_requests: rows
    return in_buckets if device.type == "cuda" else unpadded


def in_buckets(num_requests: int) -> int:
    """1, 2, 4, or a multiple of 8: few shapes, each of which is recorded once."""
    if num_requests < _PAD_FROM:
        return 1 << (num_requests - 1).bit_length()
    return -(-num_requests // _PAD_FROM) * _PAD_FROM


def unpadded(num_requests: int) -> int:
    """A row a request."""
    return num_requests
