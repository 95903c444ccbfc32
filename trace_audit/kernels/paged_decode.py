"""Attention of one token a row over a paged KV cache, each row's context split into parts.

Every launch configuration is fixed by head width alone, and a row's split count by its own length:
no result depends on a row's neighbours, on the size of the cache or on tuning.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trace_audit.kernels.attention_tile import AttentionOptions, attend_tile
from trace_audit.kernels.cached_heads import CachedHeads
from trace_audit.kernels.formats import rounded
from trace_audit.kernels.runtime import is_interpreted, triton

if triton is not None:
    from triton import language as tl

SPLIT = 256
"""Context tokens a program covers."""
_PARTS = 16  # combined at once


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """How the decode kernel is launched.

    Attributes:
        split: context tokens a program covers.
        tile: of them loaded at once.
        num_warps, num_stages: see Triton.
    """

    split: int = SPLIT
    tile: int
    num_warps: int
    num_stages: int


def decode_config(head_dim: int) -> DecodeConfig:
    """The configuration of a head width; the order of a row's sums depends on nothing else."""
    return DecodeConfig(tile=64 if head_dim <= 128 else 32, num_warps=4, num_stages=2)


def paged_decode(
    query: torch.Tensor,
    keys: CachedHeads,
    values: CachedHeads,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    options: AttentionOptions,
    config: DecodeConfig | None = None,
) -> torch.Tensor:
    """One query token a row, at the last position of its context.

    Args:
        query: [B, H, D].
        keys, values: one layer's cache, both sides in one dtype; heads of width D and DV.
        block_table: int32 [B, max_blocks], contiguous.
        context_lens: int32 [B].
        max_context_len: the largest of `context_lens`, known on the host.
        options: scale, window, softcap.
        config: how to launch, for measurements; None: what is fixed for these heads.

    Returns:
        [B, H, DV] in the query's dtype.
    """
    config = config or decode_config(query.shape[2])
    num_rows, num_heads, key_dim = query.shape
    _, block_size, num_kv_heads, value_dim = values.data.shape
    num_splits = triton.cdiv(max_context_len, config.split)
    group = num_heads // num_kv_heads
    partial_shape = (num_rows, num_heads, num_splits)
    acc = torch.empty(*partial_shape, value_dim, dtype=torch.float32, device=query.device)
    maximum = torch.empty(partial_shape, dtype=torch.float32, device=query.device)
    total = torch.empty(partial_shape, dtype=torch.float32, device=query.device)
    out = torch.empty(num_rows, num_heads, value_dim, dtype=query.dtype, device=query.device)
    _decode_kernel[(num_rows, num_kv_heads, num_splits)](
        query,
        *query.stride(),
        keys.raw,
        keys.scales,
        values.raw,
        values.scales,
        block_table,
        block_table.stride(0),
        context_lens,
        acc,
        maximum,
        total,
        num_splits,
        options.scale,
        options.softcap or 1.0,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_PAD=max(16, triton.next_power_of_2(group)),
        KEY_DIM=key_dim,
        KEY_PAD=max(16, triton.next_power_of_2(key_dim)),
        VALUE_DIM=value_dim,
        VALUE_PAD=max(16, triton.next_power_of_2(value_dim)),
        BLOCK_SIZE=block_size,
        SPLIT=config.split,
        TILE=config.tile,
        WINDOW=options.window or 0,
        SOFTCAP=options.softcap is not None,
        FP8=keys.fp8,
        INTERPRETED=is_interpreted(),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    # Interpreted, a program costs far more than its lanes do.
    heads = triton.next_power_of_2(num_heads) if is_interpreted() else 1
    _combine_kernel[(num_rows, triton.cdiv(num_heads, heads))](
        acc,
        maximum,
        total,
        context_lens,
        out,
        num_splits,
        NUM_HEADS=num_heads,
        HEADS=heads,
        VALUE_DIM=value_dim,
        VALUE_PAD=triton.next_power_of_2(value_dim),
        SPLIT=config.split,
        PARTS=_PARTS,
        WINDOW=options.window or 0,
        INTERPRETED=is_interpreted(),
        num_warps=2,
    )
    return out


if triton is not None:

    @triton.jit
    def _decode_kernel(
        query_ptr,  # [B, H, D]
        query_stride_b,
        query_stride_h,
        query_stride_d,
        keys_ptr,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, KEY_DIM], 8-bit floats as uint8
        key_scales_ptr,  # float32 [num_blocks, BLOCK_SIZE, NUM_KV_HEADS], or None
        values_ptr,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, VALUE_DIM]
        value_scales_ptr,  # as the keys'
        table_ptr,  # int32 [B, max_blocks]
        table_stride,
        context_lens_ptr,  # int32 [B]
        acc_ptr,  # float32 [B, H, num_splits, VALUE_DIM]
        maximum_ptr,  # float32 [B, H, num_splits]
        total_ptr,  # float32 [B, H, num_splits]
        num_splits,
        scale,
        softcap,
        NUM_KV_HEADS: tl.constexpr,
        GROUP: tl.constexpr,
        GROUP_PAD: tl.constexpr,
        KEY_DIM: tl.constexpr,
        KEY_PAD: tl.constexpr,
        VALUE_DIM: tl.constexpr,
        VALUE_PAD: tl.constexpr,
        BLOCK_SIZE: tl.constexpr,
        SPLIT: tl.constexpr,
        TILE: tl.constexpr,
        WINDOW: tl.constexpr,
        SOFTCAP: tl.constexpr,
        FP8: tl.constexpr,
        INTERPRETED: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        kv_head = tl.program_id(1)
        split = tl.program_id(2)
        context_len = tl.load(context_lens_ptr + row)
        start = split * SPLIT
        end = tl.minimum(start + SPLIT, context_len)
        if WINDOW > 0:
            # Whole tiles before the window are skipped; tile bounds stay those of the split.
            first = tl.maximum(context_len - WINDOW, 0)
            start = tl.maximum(start, first // TILE * TILE)
        if start < end:
            lane = tl.arange(0, GROUP_PAD)
            head = kv_head * GROUP + lane
            kd = tl.arange(0, KEY_PAD)
            q = tl.load(
                query_ptr
                + row * query_stride_b
                + head[:, None] * query_stride_h
                + kd[None, :] * query_stride_d,
                mask=(lane < GROUP)[:, None] & (kd < KEY_DIM)[None, :],
                other=0.0,
            )
            query_pos = tl.zeros([GROUP_PAD], tl.int32) + (context_len - 1)
            acc = tl.zeros([GROUP_PAD, VALUE_PAD], tl.float32)
            maximum = tl.full([GROUP_PAD], float("-inf"), tl.float32)
            total = tl.zeros([GROUP_PAD], tl.float32)
            for tile in range(start, end, TILE):
                acc, maximum, total = attend_tile(
                    q, query_pos, keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr,
                    table_ptr + row * table_stride,
                    tile, end, kv_head, acc, maximum, total, scale, softcap,
                    NUM_KV_HEADS, KEY_DIM, KEY_PAD, VALUE_DIM, VALUE_PAD, BLOCK_SIZE, TILE,
                    WINDOW, SOFTCAP, FP8, INTERPRETED,
                )  # fmt: skip
            out = (row * NUM_KV_HEADS * GROUP + head) * num_splits + split
            vd = tl.arange(0, VALUE_PAD)
            tl.store(
                acc_ptr + out[:, None] * VALUE_DIM + vd[None, :],
                acc,
                mask=(lane < GROUP)[:, None] & (vd < VALUE_DIM)[None, :],
            )
            tl.store(maximum_ptr + out, maximum, mask=lane < GROUP)
            tl.store(total_ptr + out, total, mask=lane < GROUP)

    @triton.jit
    def _combine_kernel(
        acc_ptr,  # float32 [B, H, num_splits, VALUE_DIM]
        maximum_ptr,  # float32 [B, H, num_splits]
        total_ptr,  # float32 [B, H, num_splits]
        context_lens_ptr,  # int32 [B]
        out_ptr,  # [B, H, VALUE_DIM]
        num_splits,
        NUM_HEADS: tl.constexpr,
        HEADS: tl.constexpr,
        VALUE_DIM: tl.constexpr,
        VALUE_PAD: tl.constexpr,
        SPLIT: tl.constexpr,
        PARTS: tl.constexpr,
        WINDOW: tl.constexpr,
        INTERPRETED: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        context_len = tl.load(context_lens_ptr + row)
        first = 0
        if WINDOW > 0:
            first = tl.maximum(context_len - WINDOW, 0) // SPLIT
        end = tl.cdiv(context_len, SPLIT)
        lane = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        real = lane < NUM_HEADS
        head = row * NUM_HEADS + lane
        vd = tl.arange(0, VALUE_PAD)
        acc = tl.zeros([HEADS, VALUE_PAD], tl.float32)
        maximum = tl.full([HEADS], float("-inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        # From the row's own first part on, so that the sum's order is the row's own.
        for start in range(first, end, PARTS):
            part = start + tl.arange(0, PARTS)
            index = head[:, None] * num_splits + part[None, :]
            known = real[:, None] & (part < end)[None, :]
            part_maximum = tl.load(maximum_ptr + index, mask=known, other=float("-inf"))
            part_total = tl.load(total_ptr + index, mask=known, other=0.0)
            part_acc = tl.load(
                acc_ptr + index[:, :, None] * VALUE_DIM + vd[None, None, :],
                mask=known[:, :, None] & (vd < VALUE_DIM)[None, None, :],
                other=0.0,
            )
            new_maximum = tl.maximum(maximum, tl.max(part_maximum, axis=1))
            safe = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            old = tl.exp(maximum - safe)
            new = tl.exp(part_maximum - safe[:, None])
            acc = acc * old[:, None] + tl.sum(part_acc * new[:, :, None], axis=1)
            total = total * old + tl.sum(part_total * new, axis=1)
            maximum = new_maximum
        tl.store(
            out_ptr + head[:, None] * VALUE_DIM + vd[None, :],
            rounded(acc / total[:, None], out_ptr.dtype.element_ty, INTERPRETED),
            mask=real[:, None] & (vd < VALUE_DIM)[None, :],
        )
