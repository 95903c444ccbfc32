"""What is left of each chunk's mass without some ids, in one launch."""

from __future__ import annotations

import torch

from trace_audit.kernels.partials import CHUNK, VocabularyPartials
from trace_audit.kernels.runtime import EACH_ROUNDED, is_interpreted, triton

if triton is not None:
    from triton import language as tl

    from trace_audit.kernels.transcendental import exp


def chunk_masses(
    logits: torch.Tensor, partials: VocabularyPartials, excluded: torch.Tensor
) -> torch.Tensor:
    """Sum of exp(x - row maximum) over each chunk's ids that are not excluded.

    Chunks that hold an excluded id are summed anew without it, so nothing cancels however small
    the rest is.

    Args:
        logits: [B, V], rows contiguous.
        partials: of these logits.
        excluded: integer [B, K], rows contiguous, each id at most once; -1 is no id.

    Returns:
        float32 [B, C].
    """
    mass = torch.empty_like(partials.sum_exp)
    num_rows, chunks = mass.shape
    num_excluded = excluded.shape[1]
    _chunk_masses_kernel[(num_rows,)](
        logits,
        logits.stride(0),
        partials.maximum,
        partials.sum_exp,
        excluded,
        excluded.stride(0),
        mass,
        logits.shape[1],
        chunks,
        K=num_excluded,
        K_PAD=triton.next_power_of_2(num_excluded),
        CHUNKS_PAD=triton.next_power_of_2(chunks),
        CHUNK=CHUNK,
        INTERPRETED=is_interpreted(),
        **EACH_ROUNDED,
        num_warps=8,
    )
    return mass


if triton is not None:

    @triton.jit
    def _chunk_masses_kernel(
        logits_ptr,  # [B, V]
        logits_stride,
        maximum_ptr,  # float32 [B, C]
        sum_exp_ptr,  # float32 [B, C]
        excluded_ptr,  # integer [B, K]
        excluded_stride,
        mass_ptr,  # float32 [B, C]
        vocabulary_size,
        chunks,
        K: tl.constexpr,
        K_PAD: tl.constexpr,
        CHUNKS_PAD: tl.constexpr,
        CHUNK: tl.constexpr,
        INTERPRETED: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        lane = tl.arange(0, CHUNKS_PAD)
        real = lane < chunks
        at = row * chunks + lane
        maximum = tl.load(maximum_ptr + at, mask=real, other=float("-inf"))
        row_maximum = tl.max(maximum, axis=0)
        mass = tl.load(sum_exp_ptr + at, mask=real, other=0.0)
        mass *= exp(maximum - row_maximum, INTERPRETED)
        place = tl.arange(0, K_PAD)
        excluded_ptr += row * excluded_stride
        excluded = tl.load(excluded_ptr + place, mask=place < K, other=-1).to(tl.int32)
        chunk = tl.where(excluded >= 0, excluded // CHUNK, -1)
        ids = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        kept = (chunk >= 0)[:, None] & (ids < vocabulary_size)
        x = tl.load(logits_ptr + row * logits_stride + ids, mask=kept, other=float("-inf"))
        # Of ids that share a chunk, all are struck from each copy, and the first copy counts.
        first = chunk >= 0
        touched = lane < 0
        for i in range(K):
            struck = tl.load(excluded_ptr + i).to(tl.int32)
            struck_chunk = tl.where(struck >= 0, struck // CHUNK, -1)
            kept = kept & (ids != struck)
            touched = touched | (lane == struck_chunk)
            first = first & ((chunk != struck_chunk) | (place <= i))
        weight = tl.where(kept, exp(x.to(tl.float32) - row_maximum, INTERPRETED), 0.0)
        tl.store(mass_ptr + at, mass, mask=real & (touched == 0))
        tl.store(mass_ptr + row * chunks + chunk, tl.sum(weight, axis=1), mask=first)
