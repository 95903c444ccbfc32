"""Sums of the ranks' partial results, in the orders that engines use.

Floating-point addition is not associative, so the order is part of the numerics: with two ranks
there is one order, from three ranks on it can change bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Order = Literal["rank_order", "ring", "tree"]


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """How partial sums become one.

    Attributes:
        order: `native` leaves it to the communication library.
        float32: add in float32 and round once; else in the partial sums' own dtype.
    """

    order: Literal["native", "rank_order", "ring", "tree"]
    float32: bool = False


def reduce_partials(
    partials: Sequence[torch.Tensor], order: Order, *, float32: bool
) -> torch.Tensor:
    """The sum of equally shaped tensors.

    Args:
        partials: one a rank, any floating dtype.
        order: rank_order is ((p0 + p1) + p2) + ...; ring cuts the flattened tensor into one chunk
            a rank, and chunk c starts at rank c and goes round; tree adds neighbours pairwise.
        float32: add in float32 and round once at the end.

    Returns:
        A new tensor in the dtype of the partial sums.
    """
    dtype = partials[0].dtype
    addends = [p.float() for p in partials] if float32 else list(partials)
    if len(addends) == 1:
        return partials[0].clone()
    total = _ORDERS[order](addends)
    return total.to(dtype)


def _in_rank_order(addends: Sequence[torch.Tensor]) -> torch.Tensor:
    total = addends[0] + addends[1]
    for addend in addends[2:]:
        total += addend
    return total


def _around_the_ring(addends: Sequence[torch.Tensor]) -> torch.Tensor:
    size = len(addends)
    flat = [addend.reshape(-1) for addend in addends]
    length = -(-flat[0].numel() // size)
    chunks = []
    for start in range(size):
        part = slice(start * length, (start + 1) * length)
        chunks.append(_in_rank_order([flat[(start + i) % size][part] for i in range(size)]))
    return torch.cat(chunks).reshape(addends[0].shape)


def _in_pairs(addends: Sequence[torch.Tensor]) -> torch.Tensor:
    level = list(addends)
    while len(level) > 1:
        pairs = [level[i] + level[i + 1] for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


_ORDERS = {"rank_order": _in_rank_order, "ring": _around_the_ring, "tree": _in_pairs}
