"""Attention of prefill chunks over a paged KV cache.

Every launch configuration is fixed by head width alone: no result depends on a row's neighbours, on
the size of the cache or on tuning.
"""

from __future__ import annotations

import torch

from trace_audit.kernels.attention_tile import AttentionOptions, attend_tile
from trace_audit.kernels.cached_heads import CachedHeads
from trace_audit.kernels.formats import rounded
from trace_audit.kernels.runtime import EACH_ROUNDED, is_interpreted, triton

if triton is not None:
    from triton import language as tl


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
        **EACH_ROUNDED,
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
            + token[None, :] * query_stride_t
            + head * query_stride_h
            + kd[:, None] * query_stride_d,
            mask=real[None, :] & (kd < KEY_DIM)[:, None],
            other=0.0,
        )
        first_pos = context_len - query_len + offset
        query_pos = first_pos + tl.arange(0, QUERIES)
        start = 0
        if WINDOW > 0:
            start = tl.maximum(first_pos - WINDOW + 1, 0) // TILE * TILE
        end = tl.minimum(first_pos + QUERIES, context_len)
        acc = tl.zeros([VALUE_PAD, QUERIES], tl.float32)
        maximum = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
        for tile in range(start, end, TILE):
            acc, maximum, total = attend_tile(
                q, query_pos, keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr,
                table_ptr + row * table_stride,
                tile, end, kv_head, acc, maximum, total, scale, softcap,
                NUM_KV_HEADS, KEY_DIM, KEY_PAD, VALUE_DIM, VALUE_PAD, BLOCK_SIZE, TILE,
                WINDOW, SOFTCAP, FP8, INTERPRETED,
            )  # fmt: skip
        vd = tl.arange(0, VALUE_PAD)
        # Lanes past the row saw no key where a window ends before them; they are not stored.
        result = tl.trans(acc / tl.where(total == 0.0, 1.0, total)[None, :])
        tl.store(
            out_ptr + (token[:, None] * NUM_HEADS + head) * VALUE_DIM + vd[None, :],
            rounded(result, out_ptr.dtype.element_ty, INTERPRETED),
            mask=real[:, None] & (vd < VALUE_DIM)[None, :],
        )
