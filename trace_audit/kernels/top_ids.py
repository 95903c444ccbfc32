"""The best ids of a row from the maxima of its chunks, in one launch."""

from __future__ import annotations

import torch

from trace_audit.kernels.partials import CHUNK
from trace_audit.kernels.runtime import triton

if triton is not None:
    from triton import language as tl

_LEAST = -(2**63)


def top_ids(logits: torch.Tensor, maximum: torch.Tensor, k: int) -> torch.Tensor:
    """The k best ids of each row, best first, of equal logits the lowest id first; NaN last.

    The k best ids lie in the k chunks of largest maximum, lowest first among equals.

    Args:
        logits: [B, V], rows contiguous.
        maximum: float32 [B, C], chunk maxima of `VocabularyPartials`.
        k: ids wanted.

    Returns:
        int32 [B, k]; -1 where the vocabulary has fewer.
    """
    num_rows, vocabulary_size = logits.shape
    chunks = maximum.shape[1]
    num_wanted, num_chunks = min(k, vocabulary_size), min(k, chunks)
    out = torch.empty(num_rows, k, dtype=torch.int32, device=logits.device)
    _top_ids_kernel[(num_rows,)](
        logits,
        logits.stride(0),
        maximum,
        out,
        vocabulary_size,
        chunks,
        K=k,
        WANTED=num_wanted,
        NUM_CHUNKS=num_chunks,
        NUM_CHUNKS_PAD=triton.next_power_of_2(num_chunks),
        CHUNKS_PAD=triton.next_power_of_2(chunks),
        CHUNK=CHUNK,
        LEAST=_LEAST,
        num_warps=8,
    )
    return out


if triton is not None:

    @triton.jit
    def _keys(x, position):
        """int64 that order like float32 `x`, then by lowest position: never equal, NaN last."""
        # -0 is 0; the sign is folded so that bits order like the float.
        bits = (x + 0.0).to(tl.int32, bitcast=True)
        order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        order = tl.where(x != x, -2147483648, order).to(tl.int64)
        return (order << 32) | (0xFFFFFFFF - position.to(tl.int64))

    @triton.jit
    def _top_ids_kernel(
        logits_ptr,  # [B, V]
        logits_stride,
        maximum_ptr,  # float32 [B, C]
        out_ptr,  # int32 [B, K]
        vocabulary_size,
        chunks,
        K: tl.constexpr,
        WANTED: tl.constexpr,
        NUM_CHUNKS: tl.constexpr,
        NUM_CHUNKS_PAD: tl.constexpr,
        CHUNKS_PAD: tl.constexpr,
        CHUNK: tl.constexpr,
        LEAST: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        lane = tl.arange(0, CHUNKS_PAD)
        real = lane < chunks
        keys = _keys(tl.load(maximum_ptr + row * chunks + lane, mask=real, other=0.0), lane)
        keys = tl.where(real, keys, LEAST)
        place = tl.arange(0, NUM_CHUNKS_PAD)
        chunk = tl.zeros([NUM_CHUNKS_PAD], tl.int64)
        for i in range(NUM_CHUNKS):
            best = tl.max(keys, axis=0)
            chunk = tl.where(place == i, 0xFFFFFFFF - (best & 0xFFFFFFFF), chunk)
            keys = tl.where(keys == best, LEAST, keys)
        ids = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        inside = (place < NUM_CHUNKS)[:, None] & (ids < vocabulary_size)
        x = tl.load(logits_ptr + row * logits_stride + ids, mask=inside, other=0.0)
        keys = tl.where(inside, _keys(x.to(tl.float32), ids), LEAST)
        for i in range(WANTED):
            best = tl.max(tl.max(keys, axis=1), axis=0)
            tl.store(out_ptr + row * K + i, (0xFFFFFFFF - (best & 0xFFFFFFFF)).to(tl.int32))
            keys = tl.where(keys == best, LEAST, keys)
        for i in range(WANTED, K):
            tl.store(out_ptr + row * K + i, -1)
