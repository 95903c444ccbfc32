"""Attention of one token a row over a paged KV cache, each row's context split into parts.

A part's length depends on the length of its row's context and on how many rows an engine may have,
never on how many there are, and the parts are joined one after the other: no result depends on a
row's neighbours, on the size of the cache or on tuning.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trace_audit.kernels.attention_tile import AttentionOptions, attend_tile
from trace_audit.kernels.cached_heads import CachedHeads
from trace_audit.kernels.formats import rounded
from trace_audit.kernels.overlap import overlap_options
from trace_audit.kernels.runtime import EACH_ROUNDED, is_interpreted, triton

if triton is not None:
    from triton import language as tl

    from trace_audit.kernels.overlap import wait_for_predecessor

SPLIT = 256
"""Context tokens of a part; more where a row would have more than `MAX_PARTS` of them."""
LONG_SPLIT = 1024
"""The same where a full launch has `MANY_HEADS` KV heads in all its rows, enough to occupy a GPU: 5
to 10 % less time on an H200, and up to three times as much where there are fewer."""
MANY_HEADS = 512
MAX_PARTS = 64
_DOUBLINGS = 8  # of a part's length: for contexts of up to 4 million tokens
_EXTRA = 4  # floats behind a part's sum: its largest score, its total, and two for alignment
_UNROLLED = 8  # parts whose loads are under way at once


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """How the decode kernel is launched.

    Attributes:
        split: context tokens of a part; it and `tile` are part of what is computed.
        tile: of them loaded at once, a divisor of `split`.
        num_warps, num_stages: see Triton.
    """

    split: int = SPLIT
    tile: int
    num_warps: int = 4
    num_stages: int = 2


def split_length(max_rows: int, num_kv_heads: int) -> int:
    """Context tokens of a part in launches of up to `max_rows` rows.

    Args:
        max_rows: of the engine's configuration.
        num_kv_heads: of the whole model: ranks that hold some of them must split alike.
    """
    return LONG_SPLIT if max_rows * num_kv_heads >= MANY_HEADS else SPLIT


def decode_config(head_dim: int, split: int = SPLIT) -> DecodeConfig:
    """The configuration of a head width."""
    return DecodeConfig(split=split, tile=64 if head_dim <= 128 else 32)


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
        config: how to launch; None: what is fixed for these heads, and the shorter parts.

    Returns:
        [B, H, DV] in the query's dtype.
    """
    num_rows, num_heads, key_dim = query.shape
    _, block_size, num_kv_heads, value_dim = values.data.shape
    config = config or decode_config(key_dim)
    group = num_heads // num_kv_heads
    out = torch.empty(num_rows, num_heads, value_dim, dtype=query.dtype, device=query.device)
    num_parts = min(triton.cdiv(max_context_len, config.split), MAX_PARTS)
    shape = (num_rows, num_heads, num_parts, value_dim + _EXTRA)
    parts = torch.empty(shape, dtype=torch.float32, device=query.device)
    _decode_kernel[(num_rows, num_kv_heads, num_parts)](
        query,
        *query.stride(),
        keys.raw,
        keys.scales,
        values.raw,
        values.scales,
        block_table,
        block_table.stride(0),
        context_lens,
        parts,
        num_parts,
        options.scale,
        options.softcap or 1.0,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_PAD=max(8, triton.next_power_of_2(group)),
        KEY_DIM=key_dim,
        KEY_PAD=max(16, triton.next_power_of_2(key_dim)),
        VALUE_DIM=value_dim,
        VALUE_PAD=max(16, triton.next_power_of_2(value_dim)),
        BLOCK_SIZE=block_size,
        PART=value_dim + _EXTRA,
        SPLIT=config.split,
        TILE=config.tile,
        WINDOW=options.window or 0,
        SOFTCAP=options.softcap is not None,
        FP8=keys.fp8,
        DOUBLINGS=_DOUBLINGS,
        MAX_PARTS=MAX_PARTS,
        INTERPRETED=is_interpreted(),
        **EACH_ROUNDED,
        **overlap_options(query.device),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    # Interpreted, a program costs far more than its lanes do.
    heads = triton.next_power_of_2(num_heads) if is_interpreted() else 1
    _join_kernel[(num_rows, triton.cdiv(num_heads, heads))](
        parts,
        context_lens,
        out,
        num_parts,
        NUM_HEADS=num_heads,
        HEADS=heads,
        VALUE_DIM=value_dim,
        VALUE_PAD=triton.next_power_of_2(value_dim),
        PART=value_dim + _EXTRA,
        SPLIT=config.split,
        WINDOW=options.window or 0,
        UNROLLED=_UNROLLED,
        DOUBLINGS=_DOUBLINGS,
        MAX_PARTS=MAX_PARTS,
        INTERPRETED=is_interpreted(),
        **EACH_ROUNDED,
        **overlap_options(query.device),
        num_warps=1,
    )
    return out


if triton is not None:

    @triton.jit
    def _part_length(
        context_len, SPLIT: tl.constexpr, DOUBLINGS: tl.constexpr, MAX_PARTS: tl.constexpr
    ):
        length = SPLIT
        for _ in tl.static_range(DOUBLINGS):
            length = tl.where(context_len > length * MAX_PARTS, length * 2, length)
        return length

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
        parts_ptr,  # float32 [B, H, num_parts, PART]
        num_parts,
        scale,
        softcap,
        NUM_KV_HEADS: tl.constexpr,
        GROUP: tl.constexpr,
        GROUP_PAD: tl.constexpr,
        KEY_DIM: tl.constexpr,
        KEY_PAD: tl.constexpr,
        VALUE_DIM: tl.constexpr,
        VALUE_PAD: tl.constexpr,
        PART: tl.constexpr,
        BLOCK_SIZE: tl.constexpr,
        SPLIT: tl.constexpr,
        TILE: tl.constexpr,
        WINDOW: tl.constexpr,
        SOFTCAP: tl.constexpr,
        FP8: tl.constexpr,
        DOUBLINGS: tl.constexpr,
        MAX_PARTS: tl.constexpr,
        INTERPRETED: tl.constexpr,
        OVERLAPS: tl.constexpr,
    ):
        wait_for_predecessor(OVERLAPS)
        row = tl.program_id(0).to(tl.int64)
        kv_head = tl.program_id(1)
        part = tl.program_id(2)
        context_len = tl.load(context_lens_ptr + row)
        length = _part_length(context_len, SPLIT, DOUBLINGS, MAX_PARTS)
        start = part * length
        end = tl.minimum(start + length, context_len)
        if WINDOW > 0:
            # Whole tiles before the window are skipped; tile bounds stay those of the part.
            first = tl.maximum(context_len - WINDOW, 0)
            start = tl.maximum(start, first // TILE * TILE)
        if start < end:
            lane = tl.arange(0, GROUP_PAD)
            real = lane < GROUP
            head = kv_head * GROUP + lane
            kd = tl.arange(0, KEY_PAD)
            q = tl.load(
                query_ptr
                + row * query_stride_b
                + head[None, :] * query_stride_h
                + kd[:, None] * query_stride_d,
                mask=real[None, :] & (kd < KEY_DIM)[:, None],
                other=0.0,
            )
            query_pos = tl.zeros([GROUP_PAD], tl.int32) + (context_len - 1)
            acc = tl.zeros([VALUE_PAD, GROUP_PAD], tl.float32)
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
            out = parts_ptr + ((row * NUM_KV_HEADS * GROUP + head) * num_parts + part) * PART
            vd = tl.arange(0, VALUE_PAD)
            tl.store(
                out[:, None] + vd[None, :],
                tl.trans(acc),
                mask=real[:, None] & (vd < VALUE_DIM)[None, :],
            )
            tl.store(out + VALUE_DIM, maximum, mask=real)
            tl.store(out + VALUE_DIM + 1, total, mask=real)

    @triton.jit
    def _join_kernel(
        parts_ptr,  # float32 [B, H, num_parts, PART]
        context_lens_ptr,  # int32 [B]
        out_ptr,  # [B, H, VALUE_DIM]
        num_parts,
        NUM_HEADS: tl.constexpr,
        HEADS: tl.constexpr,
        VALUE_DIM: tl.constexpr,
        VALUE_PAD: tl.constexpr,
        PART: tl.constexpr,
        SPLIT: tl.constexpr,
        WINDOW: tl.constexpr,
        UNROLLED: tl.constexpr,
        DOUBLINGS: tl.constexpr,
        MAX_PARTS: tl.constexpr,
        INTERPRETED: tl.constexpr,
        OVERLAPS: tl.constexpr,
    ):
        wait_for_predecessor(OVERLAPS)
        row = tl.program_id(0).to(tl.int64)
        context_len = tl.load(context_lens_ptr + row)
        length = _part_length(context_len, SPLIT, DOUBLINGS, MAX_PARTS)
        first = 0
        if WINDOW > 0:
            first = tl.maximum(context_len - WINDOW, 0) // length
        end = tl.cdiv(context_len, length)
        lane = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        real = lane < NUM_HEADS
        head = row * NUM_HEADS + lane
        vd = tl.arange(0, VALUE_PAD)
        acc = tl.zeros([HEADS, VALUE_PAD], tl.float32)
        maximum = tl.full([HEADS], float("-inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        for start in range(first, end, UNROLLED):
            for i in tl.static_range(UNROLLED):
                # Beyond the end all parts are empty, and change nothing.
                known = lane < tl.where(start + i < end, NUM_HEADS, 0)
                part = parts_ptr + (head * num_parts + start + i) * PART
                part_acc = tl.load(
                    part[:, None] + vd[None, :],
                    mask=known[:, None] & (vd < VALUE_DIM)[None, :],
                    other=0.0,
                )
                part_maximum = tl.load(part + VALUE_DIM, mask=known, other=float("-inf"))
                part_total = tl.load(part + VALUE_DIM + 1, mask=known, other=0.0)
                new_maximum = tl.maximum(maximum, part_maximum)
                safe = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
                old = tl.exp(maximum - safe)
                new = tl.exp(part_maximum - safe)
                acc = tl.fma(acc, old[:, None], part_acc * new[:, None])
                total = tl.fma(total, old, part_total * new)
                maximum = new_maximum
        tl.store(
            out_ptr + head[:, None] * VALUE_DIM + vd[None, :],
            rounded(acc / total[:, None], out_ptr.dtype.element_ty, INTERPRETED),
            mask=real[:, None] & (vd < VALUE_DIM)[None, :],
        )
