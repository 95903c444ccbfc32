"""Writing keys and values into the cache."""

from __future__ import annotations

import torch

from trace_audit.kernels.cached_heads import LARGEST, CachedHeads
from trace_audit.kernels.formats import encoded_fp8, rounded
from trace_audit.kernels.overlap import overlap_options
from trace_audit.kernels.runtime import EACH_ROUNDED, is_interpreted, triton

if triton is not None:
    from triton import language as tl

    from trace_audit.kernels.overlap import wait_for_predecessor

_TOKENS = 16


def write_plain(
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    keys: CachedHeads,
    values: CachedHeads,
) -> None:
    """Store a launch's keys and values in a cache of 16 or 32 bit numbers, in one launch.

    Args:
        key, value: [T, KV, D] and [T, KV, DV] in a float dtype, heads contiguous.
        slots: int64 [T], flat token slots of the cache.
        keys, values: where to; rounded to their dtype, to nearest even.
    """
    num_tokens, num_heads, key_dim = key.shape
    value_dim = value.shape[2]
    assert key.stride(2) == value.stride(2) == 1
    _write_plain_kernel[(triton.cdiv(num_tokens, _TOKENS), num_heads)](
        key,
        *key.stride()[:2],
        value,
        *value.stride()[:2],
        slots,
        keys.data,
        values.data,
        num_tokens,
        NUM_HEADS=num_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        WIDTH_PAD=triton.next_power_of_2(max(key_dim, value_dim)),
        TOKENS=_TOKENS,
        INTERPRETED=is_interpreted(),
        **overlap_options(key.device),
        num_warps=4,
    )


def write_quantized(heads: torch.Tensor, slots: torch.Tensor, cached: CachedHeads) -> None:
    """Round a launch's keys or values to the 8-bit cache.

    A head's vector depends on nothing but itself. Finite numbers beyond the largest are stored as
    the largest; anything not finite becomes NaN: of the element where there are no scales, of the
    head's whole vector, through its scale, where there are.

    Args:
        heads: [T, KV, D] in a float dtype.
        slots: int64 [T], flat token slots of the cache.
        cached: where to; `scales`, where it has them, become max |x| / largest.
    """
    num_tokens, num_heads, width = heads.shape
    largest = LARGEST[cached.data.dtype]
    _write_kernel[(triton.cdiv(num_tokens, _TOKENS), num_heads)](
        heads,
        *heads.stride(),
        slots,
        cached.raw,
        cached.scales,
        num_tokens,
        NUM_HEADS=num_heads,
        WIDTH=width,
        WIDTH_PAD=triton.next_power_of_2(width),
        TOKENS=_TOKENS,
        LARGEST=largest,
        INVERSE=1.0 / largest,
        FP8=cached.fp8,
        **EACH_ROUNDED,
        **overlap_options(heads.device),
        num_warps=4,
    )


if triton is not None:

    @triton.jit
    def _write_plain_kernel(
        key_ptr,  # [T, NUM_HEADS, KEY_DIM]
        key_stride_t,
        key_stride_h,
        value_ptr,  # [T, NUM_HEADS, VALUE_DIM]
        value_stride_t,
        value_stride_h,
        slots_ptr,  # int64 [T]
        keys_ptr,  # [slots, NUM_HEADS, KEY_DIM]
        values_ptr,  # [slots, NUM_HEADS, VALUE_DIM]
        num_tokens,
        NUM_HEADS: tl.constexpr,
        KEY_DIM: tl.constexpr,
        VALUE_DIM: tl.constexpr,
        WIDTH_PAD: tl.constexpr,
        TOKENS: tl.constexpr,
        INTERPRETED: tl.constexpr,
        OVERLAPS: tl.constexpr,
    ):
        wait_for_predecessor(OVERLAPS)
        token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
        head = tl.program_id(1)
        real = (token < num_tokens)[:, None]
        lane = tl.arange(0, WIDTH_PAD)[None, :]
        out = (tl.load(slots_ptr + token, mask=token < num_tokens, other=0) * NUM_HEADS + head)[
            :, None
        ]
        inside = real & (lane < KEY_DIM)
        at = token[:, None] * key_stride_t + head * key_stride_h + lane
        x = tl.load(key_ptr + at, mask=inside, other=0.0)
        x = rounded(x, keys_ptr.dtype.element_ty, INTERPRETED)
        tl.store(keys_ptr + out * KEY_DIM + lane, x, mask=inside)
        inside = real & (lane < VALUE_DIM)
        at = token[:, None] * value_stride_t + head * value_stride_h + lane
        x = tl.load(value_ptr + at, mask=inside, other=0.0)
        x = rounded(x, values_ptr.dtype.element_ty, INTERPRETED)
        tl.store(values_ptr + out * VALUE_DIM + lane, x, mask=inside)

    @triton.jit
    def _write_kernel(
        heads_ptr,  # [T, NUM_HEADS, WIDTH]
        stride_t,
        stride_h,
        stride_d,
        slots_ptr,  # int64 [T]
        data_ptr,  # int8 or uint8 [slots, NUM_HEADS, WIDTH]
        scales_ptr,  # float32 [slots, NUM_HEADS], or None
        num_tokens,
        NUM_HEADS: tl.constexpr,
        WIDTH: tl.constexpr,
        WIDTH_PAD: tl.constexpr,
        TOKENS: tl.constexpr,
        LARGEST: tl.constexpr,
        INVERSE: tl.constexpr,
        FP8: tl.constexpr,
        OVERLAPS: tl.constexpr,
    ):
        wait_for_predecessor(OVERLAPS)
        token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
        head = tl.program_id(1)
        real = token < num_tokens
        lane = tl.arange(0, WIDTH_PAD)
        inside = real[:, None] & (lane < WIDTH)[None, :]
        x = tl.load(
            heads_ptr + token[:, None] * stride_t + head * stride_h + lane[None, :] * stride_d,
            mask=inside,
            other=0.0,
        ).to(tl.float32)
        out = tl.load(slots_ptr + token, mask=real, other=0) * NUM_HEADS + head
        finite = tl.abs(x) < float("inf")
        if scales_ptr is not None:
            largest = tl.max(tl.where(finite, tl.abs(x), 0.0), axis=1)
            all_finite = tl.min(finite.to(tl.int32), axis=1) == 1
            scale = tl.where(all_finite, largest * INVERSE, float("nan"))
            tl.store(scales_ptr + out, scale, mask=real)
            divides = scale > 0
            x = tl.div_rn(x, tl.where(divides, scale, 1.0)[:, None])
            x = tl.where(divides[:, None], x, 0.0)
        clamped = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
        at = data_ptr + out[:, None] * WIDTH + lane[None, :]
        if FP8 == "":
            # Adding 1.5 * 2^23 rounds to an integer, ties to even.
            code = (clamped + 12582912.0) - 12582912.0
            tl.store(at, code.to(tl.int8), mask=inside)
        else:
            # Only where there is no scale is anything not finite left here.
            x = tl.where(tl.abs(x) < float("inf"), clamped, float("nan"))
            tl.store(at, encoded_fp8(x, FP8), mask=inside)
