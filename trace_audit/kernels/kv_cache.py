"""Writing keys and values into a cache of 8-bit numbers."""

from __future__ import annotations

import torch

from trace_audit.kernels.cached_heads import LARGEST, CachedHeads
from trace_audit.kernels.formats import encoded_fp8
from trace_audit.kernels.runtime import triton

if triton is not None:
    from triton import language as tl

_TOKENS = 16


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
        num_warps=4,
    )


if triton is not None:

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
    ):
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
