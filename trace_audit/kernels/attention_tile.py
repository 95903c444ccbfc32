"""What every paged attention kernel does: fold some context tokens into a running softmax."""

from __future__ import annotations

from dataclasses import dataclass

from trace_audit.kernels.formats import decoded, rounded
from trace_audit.kernels.runtime import triton

if triton is not None:
    from triton import language as tl


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """What a layer asks for besides plain causal attention; see `LayerSpec`."""

    scale: float
    window: int | None
    softcap: float | None


if triton is not None:

    @triton.jit
    def attend_tile(
        q,  # [KEY_PAD, Q]
        query_pos,  # [Q], absolute positions
        keys_ptr,
        key_scales_ptr,
        values_ptr,
        value_scales_ptr,
        table_row_ptr,
        start,
        end,
        kv_head,
        acc,  # float32 [VALUE_PAD, Q]
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
        """Fold context tokens start.. (below end) into a running softmax.

        Queries are columns: there may be as few as eight of them, and a tensor core multiplies any
        number of columns from eight up, but rows by 64.
        """
        pos = start + tl.arange(0, TILE)
        inside = pos < end
        block = tl.load(table_row_ptr + pos // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        token = (block * BLOCK_SIZE + pos % BLOCK_SIZE) * NUM_KV_HEADS + kv_head
        kd = tl.arange(0, KEY_PAD)
        k = tl.load(
            keys_ptr + token[:, None] * KEY_DIM + kd[None, :],
            mask=inside[:, None] & (kd < KEY_DIM)[None, :],
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
            key_scale = tl.load(key_scales_ptr + token, mask=inside, other=0.0)[:, None]
            value_scale = tl.load(value_scales_ptr + token, mask=inside, other=0.0)[:, None]
        # The rounding points of the eager backend: keys, values and weights in the query's dtype.
        k = rounded(decoded(k, key_scale, FP8), q.dtype, INTERPRETED)
        v = rounded(decoded(v, value_scale, FP8), q.dtype, INTERPRETED)
        query = rounded(q, q.dtype, INTERPRETED)
        scores = tl.dot(k, query, input_precision="ieee") * scale
        if SOFTCAP:
            scaled = scores / softcap
            # tanh through exp of a non-positive number: no overflow.
            e = tl.exp(-2.0 * tl.abs(scaled))
            scores = softcap * tl.where(scaled >= 0, 1.0, -1.0) * (1.0 - e) / (1.0 + e)
        seen = inside[:, None] & (pos[:, None] <= query_pos[None, :])
        if WINDOW > 0:
            seen = seen & (query_pos[None, :] - pos[:, None] < WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=0))
        safe = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        p = tl.exp(scores - safe[None, :])
        correction = tl.exp(maximum - safe)
        total = tl.fma(total, correction, tl.sum(p, axis=0))
        p = rounded(p, q.dtype, INTERPRETED)
        acc = acc * correction[None, :] + tl.dot(tl.trans(v), p, input_precision="ieee")
        return acc, new_maximum, total
