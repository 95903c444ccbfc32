"""Two passes over the vocabulary that leave a few numbers a chunk of ids.

Neither copies the logits to float32 as a whole. `top_ids`, `chunk_masses` and `row_statistics` are
built on the small tables they leave; the tail mass is a sum, never 1 minus the rest, and the chunk
maxima are enough to find the best ids exactly, ties included.
"""

from __future__ import annotations

import torch

from trace_audit.kernels.partials import CHUNK, TokenCounts, VocabularyPartials, num_chunks
from trace_audit.kernels.runtime import EACH_ROUNDED, is_interpreted, triton

if triton is not None:
    from triton import language as tl

    from trace_audit.kernels.transcendental import exp

_CHUNKS_PER_PROGRAM = 8
_CHUNKS_PER_PROGRAM_INTERPRETED = 256


def vocabulary_partials(logits: torch.Tensor, multipliers: torch.Tensor) -> VocabularyPartials:
    """First pass: what does not depend on the token.

    Args:
        logits: [B, V] in float32, bfloat16 or float16, rows contiguous; read only.
        multipliers: int64 [V], odd.
    """
    num_rows, vocabulary_size = logits.shape
    chunks = num_chunks(vocabulary_size)
    shape = (num_rows, chunks)
    device = logits.device
    partials = VocabularyPartials(
        maximum=torch.empty(shape, dtype=torch.float32, device=device),
        sum_exp=torch.empty(shape, dtype=torch.float32, device=device),
        sum_exp_x=torch.empty(shape, dtype=torch.float32, device=device),
        bits=torch.empty(shape, dtype=torch.int64, device=device),
    )
    tile = _chunks_per_program(chunks)
    _vocabulary_partials_kernel[(num_rows, triton.cdiv(chunks, tile))](
        logits,
        logits.stride(0),
        multipliers,
        partials.maximum,
        partials.sum_exp,
        partials.sum_exp_x,
        partials.bits,
        vocabulary_size,
        chunks,
        TILE=tile,
        CHUNK=CHUNK,
        INTERPRETED=is_interpreted(),
        **EACH_ROUNDED,
    )
    return partials


def token_counts(logits: torch.Tensor, tokens: torch.Tensor) -> TokenCounts:
    """Second pass: how many logits are larger than, or equal to, each row's token.

    Args:
        logits: [B, V], rows contiguous; read only.
        tokens: int64 [B], contiguous, inside the vocabulary.
    """
    num_rows, vocabulary_size = logits.shape
    chunks = num_chunks(vocabulary_size)
    counts = TokenCounts(
        num_greater=torch.empty(num_rows, chunks, dtype=torch.int32, device=logits.device),
        num_equal=torch.empty(num_rows, chunks, dtype=torch.int32, device=logits.device),
    )
    tile = _chunks_per_program(chunks)
    _token_counts_kernel[(num_rows, triton.cdiv(chunks, tile))](
        logits,
        logits.stride(0),
        tokens,
        counts.num_greater,
        counts.num_equal,
        vocabulary_size,
        chunks,
        TILE=tile,
        CHUNK=CHUNK,
    )
    return counts


def _chunks_per_program(chunks: int) -> int:
    if is_interpreted():
        return min(_CHUNKS_PER_PROGRAM_INTERPRETED, int(triton.next_power_of_2(chunks)))
    return _CHUNKS_PER_PROGRAM


if triton is not None:

    @triton.jit
    def _vocabulary_partials_kernel(
        logits_ptr,  # [B, V]
        logits_stride,
        multipliers_ptr,  # int64 [V]
        maximum_ptr,  # float32 [B, C]
        sum_exp_ptr,  # float32 [B, C]
        sum_exp_x_ptr,  # float32 [B, C]
        bits_ptr,  # int64 [B, C]
        vocabulary_size,
        chunks,
        TILE: tl.constexpr,
        CHUNK: tl.constexpr,
        INTERPRETED: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        chunk = tl.program_id(1) * TILE + tl.arange(0, TILE)
        ids = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        inside = ids < vocabulary_size
        neg_inf = float("-inf")
        x = tl.load(logits_ptr + row * logits_stride + ids, mask=inside, other=neg_inf)
        x = x.to(tl.float32)
        broken = tl.max((x != x).to(tl.int32), axis=1) > 0
        maximum = tl.where(broken, neg_inf, tl.max(x, axis=1))
        shift = x - tl.where(maximum == neg_inf, 0.0, maximum)[:, None]
        e = exp(shift, INTERPRETED)
        multipliers = tl.load(multipliers_ptr + ids, mask=inside, other=0)
        bits = x.to(tl.int32, bitcast=True).to(tl.int64) * multipliers
        out = row * chunks + chunk
        real = chunk < chunks
        tl.store(maximum_ptr + out, maximum, mask=real)
        tl.store(sum_exp_ptr + out, tl.sum(e, axis=1), mask=real)
        # exp(-inf) * -inf would be NaN; exp(-200) is 0 in float32, and so is what it adds.
        weighted = e * tl.maximum(shift, -200.0)
        tl.store(sum_exp_x_ptr + out, tl.sum(weighted, axis=1), mask=real)
        tl.store(bits_ptr + out, tl.sum(bits, axis=1), mask=real)

    @triton.jit
    def _token_counts_kernel(
        logits_ptr,  # [B, V]
        logits_stride,
        tokens_ptr,  # int64 [B]
        num_greater_ptr,  # int32 [B, C]
        num_equal_ptr,  # int32 [B, C]
        vocabulary_size,
        chunks,
        TILE: tl.constexpr,
        CHUNK: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        chunk = tl.program_id(1) * TILE + tl.arange(0, TILE)
        ids = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        inside = ids < vocabulary_size
        x = tl.load(logits_ptr + row * logits_stride + ids, mask=inside, other=0.0)
        y = tl.load(logits_ptr + row * logits_stride + tl.load(tokens_ptr + row))
        # The lanes past the vocabulary are masked by index, whatever value they hold.
        greater = inside & (x.to(tl.float32) > y.to(tl.float32))
        equal = inside & (x.to(tl.float32) == y.to(tl.float32))
        out = row * chunks + chunk
        real = chunk < chunks
        tl.store(num_greater_ptr + out, tl.sum(greater.to(tl.int32), axis=1), mask=real)
        tl.store(num_equal_ptr + out, tl.sum(equal.to(tl.int32), axis=1), mask=real)
