"""Logits after temperature, top-k and top-p, for statistics of the processed distribution."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from trace_audit.config.scoring import Distribution
from trace_audit.engine.draws import prefix_sum
from trace_audit.kernels.partials import CHUNK
from trace_audit.kernels.row_sum import row_sum


def processed(logits: torch.Tensor, distribution: Distribution) -> torch.Tensor:
    """Logits / temperature, then top-k, then top-p: what is filtered out is -inf.

    Filters compare values, never places: an id whose logit equals the last one kept is kept too, so
    the result depends on no order of equals. A row with a NaN or +inf is left unfiltered, and stays
    not finite.

    Args:
        logits: [B, V]; never written to.
        distribution: what to make of them.

    Returns:
        float32 [B, V], a copy.
    """
    values = logits.float() / distribution.temperature
    if distribution.top_k:
        kept = min(distribution.top_k, values.shape[1])
        values.masked_fill_(values < values.topk(kept).values[:, -1:], float("-inf"))
    if distribution.top_p < 1:
        values.masked_fill_(values < _least_of_nucleus(values, distribution.top_p), float("-inf"))
    return values


def _least_of_nucleus(values: torch.Tensor, top_p: float) -> torch.Tensor:
    """Smallest logit of the smallest set of most likely ids with a mass of top_p: float32 [B, 1].

    Sums are float64 in a fixed order, so that a row's set depends on no other row.
    """
    ordered = values.sort(dim=-1, descending=True).values
    weight = (ordered.double() - ordered[:, :1].double()).exp()
    chunks = pad(weight, (0, -weight.shape[1] % CHUNK)).unflatten(1, (-1, CHUNK))
    prefix = prefix_sum(row_sum(chunks))
    target = top_p * prefix[:, -1:]
    # The first chunk that reaches the target, and in it the first id that does.
    chunk = (prefix < target).sum(-1, keepdim=True).clamp(max=chunks.shape[1] - 1)
    before = torch.where(chunk > 0, prefix.gather(1, (chunk - 1).clamp(min=0)), 0.0)
    inside = chunks.gather(1, chunk[..., None].expand(-1, 1, CHUNK))[:, 0]
    offset = (before + prefix_sum(inside) < target).sum(-1, keepdim=True).clamp(max=CHUNK - 1)
    last = (chunk * CHUNK + offset).clamp(max=values.shape[1] - 1)
    return ordered.gather(1, last)
