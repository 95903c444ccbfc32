"""What stands between the matrix products of a decoder layer, one kernel each.

Sums and products of one kernel are float32 and are rounded where they leave it, so a rounding of
every step in between is left out.
"""

from __future__ import annotations

import torch

from trace_audit.kernels.cached_heads import CacheTarget
from trace_audit.kernels.formats import rounded
from trace_audit.kernels.overlap import overlap_options
from trace_audit.kernels.runtime import EACH_ROUNDED, is_interpreted, triton

if triton is not None:
    from triton import language as tl

    from trace_audit.kernels.overlap import wait_for_predecessor

_COLUMNS = 1024
_HEADS = 8  # of a token that one program rotates


def add_rms_norm(
    hidden: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add to the residual stream and normalize what it has become.

    Args:
        hidden: [T, H], rows contiguous; a sublayer's output.
        residual: [T, H], or None where there is none yet.
        weight: [H].
        epsilon: added to the mean square.

    Returns:
        [T, H] normalized, and the new residual stream [T, H], rounded before it is normalized.
    """
    num_tokens, width = hidden.shape
    normalized = torch.empty_like(hidden)
    total = hidden if residual is None else torch.empty_like(hidden)
    _add_rms_norm_kernel[(num_tokens,)](
        hidden,
        residual,
        weight,
        normalized,
        total,
        epsilon,
        width,
        BLOCK=triton.next_power_of_2(width),
        INTERPRETED=is_interpreted(),
        **EACH_ROUNDED,
        **overlap_options(hidden.device),
        num_warps=8,
    )
    return normalized, total


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
    """Normalize each query and key head where weights are given, and rotate it, in place.

    Args:
        heads: [T, N, D], of a token contiguous; queries, then keys, then heads left alone.
        cos, sin: [T, D].
        query_weight, key_weight: [D], both or neither.
        num_heads: query heads; as many keys as values stand behind them.
        epsilon: of the norms.
        target: where keys and values, of one width, are written too; None: nowhere.
    """
    num_tokens, all_heads, width = heads.shape
    num_kv_heads = (all_heads - num_heads) // 2
    num_used = num_heads + num_kv_heads * (1 if target is None else 2)
    # Interpreted, a program costs far more than its lanes do.
    block = triton.next_power_of_2(num_used) if is_interpreted() else _HEADS
    _norm_and_rotate_kernel[(num_tokens, triton.cdiv(num_used, block))](
        heads,
        heads.stride(0),
        cos,
        sin,
        query_weight,
        key_weight,
        None if target is None else target.slots,
        None if target is None else target.keys.data,
        None if target is None else target.values.data,
        num_heads,
        num_kv_heads,
        num_used,
        epsilon,
        HEADS=block,
        HALF=width // 2,
        HALF_PAD=triton.next_power_of_2(width // 2),
        NORM=query_weight is not None,
        INTERPRETED=is_interpreted(),
        **EACH_ROUNDED,
        **overlap_options(heads.device),
        num_warps=4,
    )


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up: [T, 2 I], gate then up, rows contiguous -> [T, I]."""
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    _silu_and_multiply_kernel[(num_tokens, triton.cdiv(width, _COLUMNS))](
        gate_up,
        out,
        width,
        BLOCK=_COLUMNS,
        INTERPRETED=is_interpreted(),
        **EACH_ROUNDED,
        **overlap_options(gate_up.device),
        num_warps=4,
    )
    return out


if triton is not None:

    @triton.jit
    def _add_rms_norm_kernel(
        hidden_ptr,  # [T, H]
        residual_ptr,  # [T, H], or None
        weight_ptr,  # [H]
        normalized_ptr,  # [T, H]
        total_ptr,  # [T, H]
        epsilon,
        width,
        BLOCK: tl.constexpr,
        INTERPRETED: tl.constexpr,
        OVERLAPS: tl.constexpr,
    ):
        wait_for_predecessor(OVERLAPS)
        start = tl.program_id(0).to(tl.int64) * width
        lane = tl.arange(0, BLOCK)
        inside = lane < width
        dtype = hidden_ptr.dtype.element_ty
        x = tl.load(hidden_ptr + start + lane, mask=inside, other=0.0).to(tl.float32)
        if residual_ptr is not None:
            x += tl.load(residual_ptr + start + lane, mask=inside, other=0.0).to(tl.float32)
            x = rounded(x, dtype, INTERPRETED).to(tl.float32)
            tl.store(total_ptr + start + lane, x, mask=inside)
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / width + epsilon)
        weight = tl.load(weight_ptr + lane, mask=inside, other=0.0).to(tl.float32)
        x = rounded(x * scale * weight, dtype, INTERPRETED)
        tl.store(normalized_ptr + start + lane, x, mask=inside)

    @triton.jit
    def _norm_and_rotate_kernel(
        heads_ptr,  # [T, N, D]
        stride_token,
        cos_ptr,  # [T, D]
        sin_ptr,  # [T, D]
        query_weight_ptr,  # [D], or None
        key_weight_ptr,  # [D], or None
        slots_ptr,  # int64 [T], or None
        keys_ptr,  # [slots, num_kv_heads, D], or None
        values_ptr,  # [slots, num_kv_heads, D], or None
        num_heads,
        num_kv_heads,
        num_used,  # queries, keys, and values if they are written
        epsilon,
        HEADS: tl.constexpr,
        HALF: tl.constexpr,
        HALF_PAD: tl.constexpr,
        NORM: tl.constexpr,
        INTERPRETED: tl.constexpr,
        OVERLAPS: tl.constexpr,
    ):
        wait_for_predecessor(OVERLAPS)
        token = tl.program_id(0).to(tl.int64)
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        lane = tl.arange(0, HALF_PAD)
        is_key = (head >= num_heads) & (head < num_heads + num_kv_heads)
        is_turned = head < num_heads + num_kv_heads
        inside = (lane < HALF)[None, :]
        known = (head < num_used)[:, None] & inside
        first = heads_ptr + token * stride_token + head[:, None] * (2 * HALF) + lane[None, :]
        x = tl.load(first, mask=known, other=0.0).to(tl.float32)
        y = tl.load(first + HALF, mask=known, other=0.0).to(tl.float32)
        dtype = heads_ptr.dtype.element_ty
        if values_ptr is not None:
            row = tl.load(slots_ptr + token) * num_kv_heads
            is_value = (head < num_used) & (head >= num_heads + num_kv_heads)
            at = (row + head - num_heads - num_kv_heads)[:, None] * (2 * HALF) + lane[None, :]
            cached = values_ptr.dtype.element_ty
            mask = is_value[:, None] & inside
            tl.store(values_ptr + at, rounded(x, cached, INTERPRETED), mask=mask)
            tl.store(values_ptr + at + HALF, rounded(y, cached, INTERPRETED), mask=mask)
        if NORM:
            square = tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)
            scale = tl.rsqrt(square / (2 * HALF) + epsilon)[:, None]
            x *= scale * _weight_of(query_weight_ptr, key_weight_ptr, is_key, lane, HALF)
            y *= scale * _weight_of(
                query_weight_ptr + HALF, key_weight_ptr + HALF, is_key, lane, HALF
            )
        at = token * (2 * HALF) + lane
        row_mask = lane < HALF
        cos_x = tl.load(cos_ptr + at, mask=row_mask, other=0.0).to(tl.float32)[None, :]
        cos_y = tl.load(cos_ptr + at + HALF, mask=row_mask, other=0.0).to(tl.float32)[None, :]
        sin_x = tl.load(sin_ptr + at, mask=row_mask, other=0.0).to(tl.float32)[None, :]
        sin_y = tl.load(sin_ptr + at + HALF, mask=row_mask, other=0.0).to(tl.float32)[None, :]
        turned_x = rounded(tl.fma(x, cos_x, -y * sin_x), dtype, INTERPRETED)
        turned_y = rounded(tl.fma(y, cos_y, x * sin_y), dtype, INTERPRETED)
        tl.store(first, turned_x, mask=is_turned[:, None] & inside)
        tl.store(first + HALF, turned_y, mask=is_turned[:, None] & inside)
        if keys_ptr is not None:
            row = tl.load(slots_ptr + token) * num_kv_heads
            at = (row + head - num_heads)[:, None] * (2 * HALF) + lane[None, :]
            cached = keys_ptr.dtype.element_ty
            mask = is_key[:, None] & inside
            tl.store(keys_ptr + at, rounded(turned_x, cached, INTERPRETED), mask=mask)
            tl.store(keys_ptr + at + HALF, rounded(turned_y, cached, INTERPRETED), mask=mask)

    @triton.jit
    def _weight_of(query_weight_ptr, key_weight_ptr, is_key, lane, HALF: tl.constexpr):
        """Half of each head's norm weights, float32 [HEADS, HALF_PAD]."""
        query = tl.load(query_weight_ptr + lane, mask=lane < HALF, other=0.0)
        key = tl.load(key_weight_ptr + lane, mask=lane < HALF, other=0.0)
        return tl.where(is_key[:, None], key[None, :], query[None, :]).to(tl.float32)

    @triton.jit
    def _silu_and_multiply_kernel(
        gate_up_ptr,  # [T, 2 * width]
        out_ptr,  # [T, width]
        width,
        BLOCK: tl.constexpr,
        INTERPRETED: tl.constexpr,
        OVERLAPS: tl.constexpr,
    ):
        wait_for_predecessor(OVERLAPS)
        token = tl.program_id(0).to(tl.int64)
        lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = lane < width
        gate = tl.load(gate_up_ptr + token * 2 * width + lane, mask=inside, other=0.0)
        up = tl.load(gate_up_ptr + (token * 2 + 1) * width + lane, mask=inside, other=0.0)
        gate = gate.to(tl.float32)
        x = gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)
        x = rounded(x, out_ptr.dtype.element_ty, INTERPRETED)
        tl.store(out_ptr + token * width + lane, x, mask=inside)
