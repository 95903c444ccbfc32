"""The numbers of a row from its chunks' tables, in one launch."""

from __future__ import annotations

import torch

from trace_audit.kernels.partials import RowStatistics, TokenCounts, VocabularyPartials
from trace_audit.kernels.runtime import EACH_ROUNDED, is_interpreted, triton

if triton is not None:
    from triton import language as tl

    from trace_audit.kernels.transcendental import exp, log


def row_statistics(
    logits: torch.Tensor,
    partials: VocabularyPartials,
    counts: TokenCounts,
    tail: torch.Tensor,
    tokens: torch.Tensor,
    top: torch.Tensor,
    support: torch.Tensor,
) -> RowStatistics:
    """Everything that is a sum over a row's chunks or a logit against such a sum.

    Args:
        logits: [B, V], rows contiguous.
        partials: of these logits.
        counts: of these tokens.
        tail: float32 [B, C], `chunk_masses` without the fixed support.
        tokens: int64 [B], contiguous.
        top, support: integer [B, T] and [B, S], rows contiguous; -1 is no id.
    """
    num_rows, chunks = tail.shape

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device=logits.device)

    num_top, num_support = top.shape[1], support.shape[1]
    out = RowStatistics(
        logprob=empty(),
        rank=empty(dtype=torch.int32),
        tie_count=empty(dtype=torch.int32),
        entropy=empty(),
        logsumexp=empty(),
        top_logprobs=empty(num_top),
        support_logprobs=empty(num_support),
        log_tail_mass=empty(),
        logits_hash=empty(dtype=torch.int64),
    )
    _row_statistics_kernel[(num_rows,)](
        logits,
        logits.stride(0),
        partials.maximum,
        partials.sum_exp,
        partials.sum_exp_x,
        partials.bits,
        counts.num_greater,
        counts.num_equal,
        tail,
        tokens,
        top,
        top.stride(0),
        support,
        support.stride(0),
        out.logprob,
        out.rank,
        out.tie_count,
        out.entropy,
        out.logsumexp,
        out.top_logprobs,
        out.support_logprobs,
        out.log_tail_mass,
        out.logits_hash,
        chunks,
        TOP=num_top,
        TOP_PAD=triton.next_power_of_2(num_top),
        SUPPORT=num_support,
        SUPPORT_PAD=triton.next_power_of_2(num_support),
        CHUNKS_PAD=triton.next_power_of_2(chunks),
        INTERPRETED=is_interpreted(),
        **EACH_ROUNDED,
        num_warps=4,
    )
    return out


if triton is not None:

    @triton.jit
    def _row_statistics_kernel(
        logits_ptr,  # [B, V]
        logits_stride,
        maximum_ptr,  # float32 [B, C], as the next two
        sum_exp_ptr,
        sum_exp_x_ptr,
        bits_ptr,  # int64 [B, C]
        num_greater_ptr,  # int32 [B, C]
        num_equal_ptr,  # int32 [B, C]
        tail_ptr,  # float32 [B, C]
        tokens_ptr,  # int64 [B]
        top_ptr,  # integer [B, TOP]
        top_stride,
        support_ptr,  # integer [B, SUPPORT]
        support_stride,
        logprob_ptr,  # [B], as every following one
        rank_ptr,
        tie_count_ptr,
        entropy_ptr,
        logsumexp_ptr,
        top_logprobs_ptr,  # [B, TOP]
        support_logprobs_ptr,  # [B, SUPPORT]
        log_tail_mass_ptr,
        logits_hash_ptr,
        chunks,
        TOP: tl.constexpr,
        TOP_PAD: tl.constexpr,
        SUPPORT: tl.constexpr,
        SUPPORT_PAD: tl.constexpr,
        CHUNKS_PAD: tl.constexpr,
        INTERPRETED: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        logits_ptr += row * logits_stride
        lane = tl.arange(0, CHUNKS_PAD)
        real = lane < chunks
        at = row * chunks + lane
        maximum = tl.load(maximum_ptr + at, mask=real, other=float("-inf"))
        sum_exp = tl.load(sum_exp_ptr + at, mask=real, other=0.0)
        sum_exp_x = tl.load(sum_exp_x_ptr + at, mask=real, other=0.0)
        row_maximum = tl.max(maximum, axis=0)
        shift = maximum - row_maximum
        weight = exp(shift, INTERPRETED)
        # A chunk with a NaN has maximum -inf and weight 0, and 0 * NaN keeps the row's sum NaN.
        total = tl.sum(weight * sum_exp, axis=0)
        log_total = log(total, INTERPRETED)
        logsumexp = row_maximum + log_total
        shift = tl.where(shift == float("-inf"), 0.0, shift)
        mean = tl.sum(weight * (sum_exp_x + shift * sum_exp), axis=0) / total
        tl.store(logsumexp_ptr + row, logsumexp)
        tl.store(entropy_ptr + row, log_total - mean)
        tail = tl.sum(tl.load(tail_ptr + at, mask=real, other=0.0), axis=0)
        tl.store(log_tail_mass_ptr + row, log(tail, INTERPRETED) + (row_maximum - logsumexp))
        bits = tl.load(bits_ptr + at, mask=real, other=0)
        tl.store(logits_hash_ptr + row, tl.sum(bits, axis=0))
        finite = tl.abs(logsumexp) < float("inf")
        greater = tl.sum(tl.load(num_greater_ptr + at, mask=real, other=0), axis=0)
        equal = tl.sum(tl.load(num_equal_ptr + at, mask=real, other=0), axis=0)
        tl.store(rank_ptr + row, tl.where(finite, greater + 1, 0))
        tl.store(tie_count_ptr + row, tl.where(finite, equal - 1, 0))
        token = tl.load(tokens_ptr + row)
        tl.store(logprob_ptr + row, tl.load(logits_ptr + token).to(tl.float32) - logsumexp)
        _store_logprobs(
            logits_ptr, logsumexp, top_ptr + row * top_stride, top_logprobs_ptr + row * TOP,
            TOP, TOP_PAD,
        )  # fmt: skip
        _store_logprobs(
            logits_ptr, logsumexp, support_ptr + row * support_stride,
            support_logprobs_ptr + row * SUPPORT, SUPPORT, SUPPORT_PAD,
        )  # fmt: skip

    @triton.jit
    def _store_logprobs(
        row_ptr,  # [V]
        logsumexp,
        ids_ptr,  # integer [N]
        out_ptr,  # float32 [N]
        N: tl.constexpr,
        N_PAD: tl.constexpr,
    ):
        place = tl.arange(0, N_PAD)
        ids = tl.load(ids_ptr + place, mask=place < N, other=-1)
        known = ids >= 0
        logprobs = tl.load(row_ptr + ids, mask=known, other=0.0).to(tl.float32) - logsumexp
        tl.store(out_ptr + place, tl.where(known, logprobs, float("nan")), mask=place < N)
