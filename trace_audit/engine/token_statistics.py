"""Logprob, rank, top ids, entropy, tail mass and hash of each row, and how they travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from trace_audit.kernels.partials import RowStatistics

NUM_TOP = 5
"""Best ids a run stores of its own."""
SUPPORT_TOP_K = 20
"""Best ids of the record run in the fixed support."""
SUPPORT_TAIL_DRAWS = 4
"""Ids drawn from the record run's tail in the fixed support."""


@dataclass(frozen=True, kw_only=True)
class TokenStatistics(RowStatistics):
    """Statistics of B rows on the device; see `RequestOutput` for the meaning of each.

    Attributes:
        top_token_ids: int32 [B, NUM_TOP].
        support_token_ids: int32 [B, SUPPORT_TOP_K + SUPPORT_TAIL_DRAWS].
    """

    top_token_ids: torch.Tensor
    support_token_ids: torch.Tensor


_SUPPORT = SUPPORT_TOP_K + SUPPORT_TAIL_DRAWS
_LAYOUT: tuple[tuple[str, int, torch.dtype], ...] = (
    ("token_ids", 1, torch.int32),
    ("logprob", 1, torch.float32),
    ("rank", 1, torch.int32),
    ("tie_count", 1, torch.int32),
    ("entropy", 1, torch.float32),
    ("logsumexp", 1, torch.float32),
    ("top_token_ids", NUM_TOP, torch.int32),
    ("top_logprobs", NUM_TOP, torch.float32),
    ("support_token_ids", _SUPPORT, torch.int32),
    ("support_logprobs", _SUPPORT, torch.float32),
    ("log_tail_mass", 1, torch.float32),
    ("logits_hash", 1, torch.int64),
)
"""Columns of packed rows: name, elements, dtype."""


def packed(statistics: TokenStatistics, tokens: torch.Tensor) -> torch.Tensor:
    """All statistics of B rows and their tokens, int64 [B], as one int32 [B, width], bit for bit.

    One tensor a step is one copy a step, where eleven would be eleven.
    """
    columns = []
    for name, num_elements, dtype in _LAYOUT:
        values = tokens if name == "token_ids" else getattr(statistics, name)
        columns.append(values.to(dtype).reshape(-1, num_elements).view(torch.int32))
    return torch.cat(columns, dim=1)


def unpacked(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """The columns that `packed` made a matrix of, and the tokens as `token_ids`, by name."""
    columns = {}
    start = 0
    for name, num_elements, dtype in _LAYOUT:
        end = start + num_elements * dtype.itemsize // torch.int32.itemsize
        part = rows[:, start:end].clone(memory_format=torch.contiguous_format)  # aligned
        values = part.view(dtype)
        columns[name] = values[:, 0] if num_elements == 1 else values
        start = end
    return columns


def joined(parts: Sequence[TokenStatistics]) -> TokenStatistics:
    """The rows of several, in their order; at least one."""
    names = [field.name for field in fields(TokenStatistics)]
    return TokenStatistics(**{n: torch.cat([getattr(part, n) for part in parts]) for n in names})


def odd_multipliers(vocabulary_size: int, device: torch.device) -> torch.Tensor:
    """The odd 64-bit factor of each id in `logits_hash`: int64 [vocabulary_size].

    splitmix64 of the id, its lowest bit set. An odd factor is invertible modulo 2^64, so any
    change of a single logit changes the hash.
    """
    # int64 arithmetic wraps modulo 2^64; the constants are splitmix64's as signed numbers.
    x = (torch.arange(vocabulary_size, dtype=torch.int64) + 1) * -7046029254386353131
    x = (x ^ _shift_right(x, 30)) * -4658895280553007687
    x = (x ^ _shift_right(x, 27)) * -7723592293110705685
    return ((x ^ _shift_right(x, 31)) | 1).to(device)


def _shift_right(x: torch.Tensor, count: int) -> torch.Tensor:
    return (x >> count) & ((1 << (64 - count)) - 1)
