"""Attention over a paged KV cache: split-KV decode and varlen prefill.

Every launch configuration is fixed by head width and dtype alone, and a row's split count by its
own length: no result depends on a row's neighbours, on the size of the cache or on tuning.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trace_audit.kernels.cached_heads import CachedHeads
from trace_audit.kernels.formats import decoded, rounded
from trace_audit.kernels.runtime import is_interpreted, triton

if triton is not None:
    from triton import language as tl

SPLIT = 256
"""Context tokens a decode program covers."""


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """What a layer asks for besides plain causal attention; see `LayerSpec`."""

    scale: float
    window: int | None
    softcap: float | None


def paged_decode(
    query: torch.Tensor,
    keys: CachedHeads,
    values: CachedHeads,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    options: AttentionOptions,
) -> torch.Tensor:
    """One query token a row, at the last position of its context.

    Args:
        query: [B, H, D].
        keys, values: one layer's cache, both sides in one dtype; heads of width D and DV.
        block_table: int32 [B, max_blocks], contiguous.
        context_lens: int32 [B].
        max_context_len: the largest of `context_lens`, known on the host.
        options: scale, window, softcap.

    Returns:
        [B, H, DV] in the query's dtype.
    """
    num_rows, num_heads, key_dim = query.shape
    _, block_size, num_kv_heads, value_dim = values.data.shape
    num_splits = triton.cdiv(max_context_len, SPLIT)
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
        SPLIT=SPLIT,
        TILE=_tile(key_dim, value_dim),
        WINDOW=options.window or 0,
        SOFTCAP=options.softcap is not None,
        FP8=keys.fp8,
        INTERPRETED=is_interpreted(),
        num_warps=4,
        num_stages=2,
    )
    _combine_kernel[(num_rows,)](
        acc,
        maximum,
        total,
        context_lens,
        out,
        num_splits,
        NUM_HEADS=num_heads,
        HEADS_PAD=triton.next_power_of_2(num_heads),
        VALUE_DIM=value_dim,
        VALUE_PAD=triton.next_power_of_2(value_dim),
        SPLIT=SPLIT,
        WINDOW=options.window or 0,
        INTERPRETED=is_interpreted(),
        num_warps=4,
    )
    return out


def paged_prefill(
    query: torch.Tensor,
    keys: CachedHeads,
    values: CachedHeads,
    block_table: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    tiles: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    """Several query tokens a row, at the last positions of its context.

    Args:
        query: [T, H, D], rows one after the other.
        keys, values, block_table, context_lens, options: see `paged_decode`.
        query_starts: int32 [B + 1], first flat token of each row.
        tiles: int32 [num_tiles, 2] from `prefill_tiles`: row and offset in it.

    Returns:
        [T, H, DV] in the query's dtype.
    """
    num_tokens, num_heads, key_dim = query.shape
    _, block_size, num_kv_heads, value_dim = values.data.shape
    out = torch.empty(num_tokens, num_heads, value_dim, dtype=query.dtype, device=query.device)
    _prefill_kernel[(tiles.shape[0], num_heads)](
        query,
        *query.stride(),
        keys.raw,
        keys.scales,
        values.raw,
        values.scales,
        block_table,
        block_table.stride(0),
        query_starts,
        context_lens,
        tiles,
        out,
        options.scale,
        options.softcap or 1.0,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        KEY_DIM=key_dim,
        KEY_PAD=max(16, triton.next_power_of_2(key_dim)),
        VALUE_DIM=value_dim,
        VALUE_PAD=max(16, triton.next_power_of_2(value_dim)),
        BLOCK_SIZE=block_size,
        QUERIES=prefill_tile_len(key_dim, value_dim),
        TILE=_tile(key_dim, value_dim),
        WINDOW=options.window or 0,
        SOFTCAP=options.softcap is not None,
        FP8=keys.fp8,
        INTERPRETED=is_interpreted(),
        num_warps=4,
        num_stages=2,
    )
    return out


def prefill_tile_len(key_dim: int, value_dim: int) -> int:
    """Query tokens a prefill program covers."""
    return 64 if max(key_dim, value_dim) <= 128 else 32


def _tile(key_dim: int, value_dim: int) -> int:
    """Context tokens loaded at once."""
    return 64 if max(key_dim, value_dim) <= 64 else 32


if triton is not None:

    @triton.jit
    def _attend_tile(
        q,  # [Q, KEY_PAD]
        query_pos,  # [Q], absolute positions
        keys_ptr,
        key_scales_ptr,
        values_ptr,
        value_scales_ptr,
        table_row_ptr,
        start,
        end,
        kv_head,
        acc,  # float32 [Q, VALUE_PAD]
        maximum,  # float32 [Q]
        total,  # float32 [Q]
        scale,
        softcap,
        NUM_KV_HEADS: tl.constexpr,
        KEY_DIM: tl.constexpr,
        KEY_PAD: tl.constexpr,
        VALUE_DIM: tl.constexpr,
        VALUE_PAD: tl.constexpr,
        BLOCK_SIZE: tl.constexpr,
        TILE: tl.constexpr,
        WINDOW: tl.constexpr,
        SOFTCAP: tl.constexpr,
        FP8: tl.constexpr,
        INTERPRETED: tl.constexpr,
    ):
        """Fold context tokens start.. (below end) into a running softmax."""
        pos = start + tl.arange(0, TILE)
        inside = pos < end
        block = tl.load(table_row_ptr + pos // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        token = (block * BLOCK_SIZE + pos % BLOCK_SIZE) * NUM_KV_HEADS + kv_head
        kd = tl.arange(0, KEY_PAD)
        k = tl.load(
            keys_ptr + token[None, :] * KEY_DIM + kd[:, None],
            mask=inside[None, :] & (kd < KEY_DIM)[:, None],
            other=0.0,
        )
        vd = tl.arange(0, VALUE_PAD)
        v = tl.load(
            values_ptr + token[:, None] * VALUE_DIM + vd[None, :],
            mask=inside[:, None] & (vd < VALUE_DIM)[None, :],
            other=0.0,
        )
        key_scale = None
        value_scale = None
        if key_scales_ptr is not None:
            key_scale = tl.load(key_scales_ptr + token, mask=inside, other=0.0)[None, :]
            value_scale = tl.load(value_scales_ptr + token, mask=inside, other=0.0)[:, None]
        # The rounding points of the eager backend: keys, values and weights in the query's dtype.
        k = rounded(decoded(k, key_scale, FP8), q.dtype, INTERPRETED)
        v = rounded(decoded(v, value_scale, FP8), q.dtype, INTERPRETED)
        query = rounded(q, q.dtype, INTERPRETED)
        scores = tl.dot(query, k, input_precision="ieee") * scale
        if SOFTCAP:
            scaled = scores / softcap
            # tanh through exp of a non-positive number: no overflow.
            e = tl.exp(-2.0 * tl.abs(scaled))
            scores = softcap * tl.where(scaled >= 0, 1.0, -1.0) * (1.0 - e) / (1.0 + e)
        seen = inside[None, :] & (pos[None, :] <= query_pos[:, None])
        if WINDOW > 0:
            seen = seen & (query_pos[:, None] - pos[None, :] < WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        safe = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        p = tl.exp(scores - safe[:, None])
        correction = tl.exp(maximum - safe)
        total = total * correction + tl.sum(p, axis=1)
        p = rounded(p, q.dtype, INTERPRETED)
        acc = acc * correction[:, None] + tl.dot(p, v, input_precision="ieee")
        return acc, new_maximum, total

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
                acc, maximum, total = _attend_tile(
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
        HEADS_PAD: tl.constexpr,
        VALUE_DIM: tl.constexpr,
        VALUE_PAD: tl.constexpr,
        SPLIT: tl.constexpr,
        WINDOW: tl.constexpr,
        INTERPRETED: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        context_len = tl.load(context_lens_ptr + row)
        first = 0
        if WINDOW > 0:
            first = tl.maximum(context_len - WINDOW, 0) // SPLIT
        lane = tl.arange(0, HEADS_PAD)
        head = row * NUM_HEADS + lane
        vd = tl.arange(0, VALUE_PAD)
        real = (lane < NUM_HEADS)[:, None] & (vd < VALUE_DIM)[None, :]
        acc = tl.zeros([HEADS_PAD, VALUE_PAD], tl.float32)
        maximum = tl.full([HEADS_PAD], float("-inf"), tl.float32)
        total = tl.zeros([HEADS_PAD], tl.float32)
        # In the order of the splits, so that the sum's order is the row's own.
        for split in range(first, tl.cdiv(context_len, SPLIT)):
            index = head * num_splits + split
            part = tl.load(acc_ptr + index[:, None] * VALUE_DIM + vd[None, :], mask=real, other=0.0)
            part_maximum = tl.load(maximum_ptr + index, mask=lane < NUM_HEADS, other=0.0)
            part_total = tl.load(total_ptr + index, mask=lane < NUM_HEADS, other=1.0)
            new_maximum = tl.maximum(maximum, part_maximum)
            old = tl.exp(maximum - new_maximum)
            new = tl.exp(part_maximum - new_maximum)
            acc = acc * old[:, None] + part * new[:, None]
            total = total * old + part_total * new
            maximum = new_maximum
        tl.store(
            out_ptr + head[:, None] * VALUE_DIM + vd[None, :],
            rounded(acc / total[:, None], out_ptr.dtype.element_ty, INTERPRETED),
            mask=real,
        )

    @triton.jit
    def _prefill_kernel(
        query_ptr,  # [T, H, D]
        query_stride_t,
        query_stride_h,
        query_stride_d,
        keys_ptr,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, KEY_DIM], 8-bit floats as uint8
        key_scales_ptr,  # float32 [num_blocks, BLOCK_SIZE, NUM_KV_HEADS], or None
        values_ptr,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, VALUE_DIM]
        value_scales_ptr,  # as the keys'
        table_ptr,  # int32 [B, max_blocks]
        table_stride,
        query_starts_ptr,  # int32 [B + 1]
        context_lens_ptr,  # int32 [B]
        tiles_ptr,  # int32 [num_tiles, 2]
        out_ptr,  # [T, H, VALUE_DIM]
        scale,
        softcap,
        NUM_HEADS: tl.constexpr,
        NUM_KV_HEADS: tl.constexpr,
        KEY_DIM: tl.constexpr,
        KEY_PAD: tl.constexpr,
        VALUE_DIM: tl.constexpr,
        VALUE_PAD: tl.constexpr,
        BLOCK_SIZE: tl.constexpr,
        QUERIES: tl.constexpr,
        TILE: tl.constexpr,
        WINDOW: tl.constexpr,
        SOFTCAP: tl.constexpr,
        FP8: tl.constexpr,
        INTERPRETED: tl.constexpr,
    ):
        tile_id = tl.program_id(0)
        head = tl.program_id(1)
        row = tl.load(tiles_ptr + tile_id * 2).to(tl.int64)
        offset = tl.load(tiles_ptr + tile_id * 2 + 1)
        query_start = tl.load(query_starts_ptr + row)
        query_len = tl.load(query_starts_ptr + row + 1) - query_start
        context_len = tl.load(context_lens_ptr + row)
        lane = offset + tl.arange(0, QUERIES)
        real = lane < query_len
        token = (query_start + lane).to(tl.int64)
        kd = tl.arange(0, KEY_PAD)
        q = tl.load(
            query_ptr
            + token[:, None] * query_stride_t
            + head * query_stride_h
            + kd[None, :] * query_stride_d,
            mask=real[:, None] & (kd < KEY_DIM)[None, :],
            other=0.0,
        )
        first_pos = context_len - query_len + offset
        query_pos = first_pos + tl.arange(0, QUERIES)
        start = 0
        if WINDOW > 0:
            start = tl.maximum(first_pos - WINDOW + 1, 0) // TILE * TILE
        end = tl.minimum(first_pos + QUERIES, context_len)
        acc = tl.zeros([QUERIES, VALUE_PAD], tl.float32)
        maximum = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
        for tile in range(start, end, TILE):
            acc, maximum, total = _attend_tile(
                q, query_pos, keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr,
                table_ptr + row * table_stride,
                tile, end, kv_head, acc, maximum, total, scale, softcap,
                NUM_KV_HEADS, KEY_DIM, KEY_PAD, VALUE_DIM, VALUE_PAD, BLOCK_SIZE, TILE,
                WINDOW, SOFTCAP, FP8, INTERPRETED,
            )  # fmt: skip
        vd = tl.arange(0, VALUE_PAD)
        # Lanes past the row saw no key where a window ends before them; they are not stored.
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            out_ptr + (token[:, None] * NUM_HEADS + head) * VALUE_DIM + vd[None, :],
            rounded(result, out_ptr.dtype.element_ty, INTERPRETED),
            mask=real[:, None] & (vd < VALUE_DIM)[None, :],
        )
