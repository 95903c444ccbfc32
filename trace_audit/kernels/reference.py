"""Plain-torch references: the same signatures as the kernels, written to be read."""

from __future__ import annotations

import torch

from trace_audit.kernels.cached_heads import LARGEST, CachedHeads, CacheTarget


def apply_trace_tokens(
    sampled: torch.Tensor,
    idx_mapping: torch.Tensor,
    all_token_ids: torch.Tensor,
    trace_len: torch.Tensor,
    total_len: torch.Tensor,
    prompt_len: torch.Tensor,
) -> None:
    """See `trace_audit.kernels.trace_replay.apply_trace_tokens`."""
    device = sampled.device
    real = idx_mapping >= 0
    slot = idx_mapping.clamp(min=0).long()
    step = total_len[slot] - prompt_len.to(device)[slot]
    replayed = real & (step >= 0) & (step < trace_len.to(device)[slot])
    column = (prompt_len.to(device)[slot] + step).long()
    # Rows that are not replayed read their own column 0, and the value is thrown away.
    token = all_token_ids[slot, torch.where(replayed, column, torch.zeros_like(column))]
    sampled.copy_(torch.where(replayed, token.long(), sampled))


def append_tokens(
    all_token_ids: torch.Tensor, total_len: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor
) -> None:
    """See `trace_audit.kernels.trace_replay.append_tokens`."""
    real = slots >= 0
    rows = slots[real].long()
    all_token_ids[rows, total_len[rows].long()] = tokens[real].int()
    total_len[rows] += 1


def apply_trace_tokens_to_verified(
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    draft_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    all_token_ids: torch.Tensor,
    trace_len: torch.Tensor,
    total_len: torch.Tensor,
    prompt_len: torch.Tensor,
) -> None:
    """See `trace_audit.kernels.trace_replay.apply_trace_tokens_to_verified`."""
    starts, slots = cu_num_logits.tolist(), idx_mapping.tolist()
    for row, slot in enumerate(slots):
        if slot < 0:
            continue
        base = int(total_len[slot]) - int(prompt_len[slot])
        length = int(trace_len[slot])
        if not 0 <= base < length:
            continue
        num_drafts = starts[row + 1] - starts[row] - 1
        num_written = 0
        for i in range(num_drafts + 1):
            if base + i >= length:
                break
            token = all_token_ids[slot, int(prompt_len[slot]) + base + i]
            sampled[row, i] = token
            num_written += 1
            if i < num_drafts and draft_sampled[starts[row] + i + 1] != token:
                break
        num_sampled[row] = num_written


def scatter_values(out: torch.Tensor, destinations: torch.Tensor, values: torch.Tensor) -> None:
    """See `trace_audit.kernels.trace_replay.scatter_values`."""
    out.view(-1)[destinations] = values


def write_plain(
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    keys: CachedHeads,
    values: CachedHeads,
) -> None:
    """See `trace_audit.kernels.kv_cache.write_plain`."""
    for heads, cached in ((key, keys), (value, values)):
        data = cached.data
        data.flatten(0, 1).index_copy_(0, slots, heads.to(data.dtype))


def write_quantized(heads: torch.Tensor, slots: torch.Tensor, cached: CachedHeads) -> None:
    """See `trace_audit.kernels.kv_cache.write_quantized`."""
    dtype = cached.data.dtype
    largest = LARGEST[dtype]
    x = heads.float()
    if cached.scales is None:
        x = torch.where(x.isfinite(), x, float("nan"))
    else:
        # A product with the reciprocal: CUDA would divide by a number in that way, a CPU not.
        scale = x.abs().amax(-1) * (1.0 / largest)
        scale = torch.where(scale.isfinite(), scale, float("nan"))
        cached.scales.flatten(0, 1).index_copy_(0, slots, scale)
        x = torch.where((scale > 0)[..., None], x / scale[..., None], 0.0)
    # Clamped here: whether torch's own cast saturates depends on its version.
    x = x.clamp(-largest, largest)
    codes = x.round() if dtype == torch.int8 else x
    raw = cached.raw
    raw.flatten(0, 1).index_copy_(0, slots, codes.to(dtype).view(raw.dtype))


def add_rms_norm(
    hidden: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `trace_audit.kernels.fused.add_rms_norm`."""
    total = hidden if residual is None else hidden + residual
    return _rms_norm(total.float(), weight, epsilon).to(hidden.dtype), total


def norm_and_rotate(
    heads: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    query_weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
    num_heads: int,
    epsilon: float,
    target: CacheTarget | None = None,
) -> None:
    """See `trace_audit.kernels.fused.norm_and_rotate`."""
    num_kv_heads = (heads.shape[1] - num_heads) // 2
    rotated = heads[:, : num_heads + num_kv_heads]
    x = rotated.float()
    if query_weight is not None and key_weight is not None:
        query, key = x.split([num_heads, num_kv_heads], dim=1)
        sides = (_rms_norm(query, query_weight, epsilon), _rms_norm(key, key_weight, epsilon))
        x = torch.cat(sides, dim=1)
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    rotated.copy_(x * cos.float()[:, None] + turned * sin.float()[:, None])
    if target is not None:
        key, value = heads[:, num_heads:].chunk(2, dim=1)
        write_plain(key, value, target.slots, target.keys, target.values)


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """See `trace_audit.kernels.fused.silu_and_multiply`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up).to(gate_up.dtype)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight.float()
