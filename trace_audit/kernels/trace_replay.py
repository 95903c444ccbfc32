"""The overwrites of sampled tokens by the trace, and what writes to the rows that hold it.

All kernels are written over a vector of batch rows, not one program a row: under Triton's
interpreter a program costs far more than a lane does. The trace has no storage of its own: it is
the unconsumed tail of the request's row of `all_token_ids`.
"""

from __future__ import annotations

import torch

from trace_audit.kernels import reference
from trace_audit.kernels.runtime import can_run_triton, triton

if triton is not None:
    from triton import language as tl

_ROWS_PER_PROGRAM = 256
_VALUES_PER_PROGRAM = 1024
_VALUES_PER_PROGRAM_INTERPRETED = 65536


def apply_trace_tokens(
    sampled: torch.Tensor,
    idx_mapping: torch.Tensor,
    all_token_ids: torch.Tensor,
    trace_len: torch.Tensor,
    total_len: torch.Tensor,
    prompt_len: torch.Tensor,
) -> None:
    """Overwrite each replayed row's sampled token by its trace's token, in place.

    For batch row b with slot s = idx_mapping[b] and step = total_len[s] - prompt_len[s], the token
    becomes all_token_ids[s, prompt_len[s] + step] where s >= 0 and 0 <= step < trace_len[s];
    any other row keeps what was sampled. The step comes from device state alone.

    Args:
        sampled: int64 [num_reqs], in place.
        idx_mapping: int32 [num_reqs], batch row -> request slot, -1 for padding.
        all_token_ids: int32 [max_num_reqs, max_model_len], rows contiguous.
        trace_len: int32 [max_num_reqs], 0 for a request without a trace.
        total_len: int32 [max_num_reqs], prompt and committed output tokens.
        prompt_len: int32 [max_num_reqs].

    `trace_len` and `prompt_len` may be pinned CPU tensors when the others are on CUDA.
    """
    num_reqs = sampled.shape[0]
    if num_reqs == 0:
        return
    if not can_run_triton(sampled.device):
        reference.apply_trace_tokens(
            sampled, idx_mapping, all_token_ids, trace_len, total_len, prompt_len
        )
        return
    _apply_trace_tokens_kernel[(triton.cdiv(num_reqs, _ROWS_PER_PROGRAM),)](
        sampled,
        idx_mapping,
        all_token_ids,
        all_token_ids.stride(0),
        trace_len,
        total_len,
        prompt_len,
        num_reqs,
        BLOCK=_ROWS_PER_PROGRAM,
    )


def apply_trace_tokens_to_verified(
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    draft_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    all_token_ids: torch.Tensor,
    trace_len: torch.Tensor,
    total_len: torch.Tensor,
    prompt_len: torch.Tensor,
) -> None:
    """Overwrite what verification of drafts kept by the trace, and say how much of it stays.

    Row b has k_b = cu_num_logits[b + 1] - cu_num_logits[b] - 1 drafts, of slot s = idx_mapping[b]
    and step base = total_len[s] - prompt_len[s]. Where s >= 0 and 0 <= base < trace_len[s] the
    trace's tokens from base on are written until the trace ends, all k_b + 1 are, or one differs
    from the draft in its place: that one is the correction, and the keys and values of later
    drafts came from a wrong input. num_sampled[b] counts them, whatever was accepted before. Any
    other row keeps its tokens and its count. No position behind the count is written.

    Args:
        sampled: int64 [num_reqs, num_spec + 1], rows contiguous, in place.
        num_sampled: int32 [num_reqs], in place.
        draft_sampled: int32 [num_logits], entry cu_num_logits[b] is row b's last committed token
            and draft i of it is entry cu_num_logits[b] + i + 1; -1 never matches.
        cu_num_logits: int32 [num_reqs + 1].
        idx_mapping: int32 [num_reqs], batch row -> request slot, -1 for padding.
        all_token_ids, trace_len, total_len, prompt_len: see `apply_trace_tokens`.
    """
    num_reqs, width = sampled.shape
    if num_reqs == 0:
        return
    if not can_run_triton(sampled.device):
        reference.apply_trace_tokens_to_verified(
            sampled,
            num_sampled,
            draft_sampled,
            cu_num_logits,
            idx_mapping,
            all_token_ids,
            trace_len,
            total_len,
            prompt_len,
        )
        return
    _apply_trace_tokens_to_verified_kernel[(triton.cdiv(num_reqs, _ROWS_PER_PROGRAM),)](
        sampled,
        sampled.stride(0),
        num_sampled,
        draft_sampled,
        cu_num_logits,
        idx_mapping,
        all_token_ids,
        all_token_ids.stride(0),
        trace_len,
        total_len,
        prompt_len,
        num_reqs,
        width,
        BLOCK=_ROWS_PER_PROGRAM,
    )


def append_tokens(
    all_token_ids: torch.Tensor, total_len: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor
) -> None:
    """Append one token to each slot's row, in place.

    Args:
        all_token_ids: int32 [max_num_reqs, max_model_len], rows contiguous, in place.
        total_len: int32 [max_num_reqs], in place.
        slots: int32 [num_reqs], each slot at most once, -1 for padding, which has no row.
        tokens: int64 [num_reqs].
    """
    num_reqs = slots.shape[0]
    if not can_run_triton(slots.device):
        reference.append_tokens(all_token_ids, total_len, slots, tokens)
        return
    _append_tokens_kernel[(triton.cdiv(num_reqs, _ROWS_PER_PROGRAM),)](
        all_token_ids,
        all_token_ids.stride(0),
        total_len,
        slots,
        tokens,
        num_reqs,
        BLOCK=_ROWS_PER_PROGRAM,
    )


def scatter_values(out: torch.Tensor, destinations: torch.Tensor, values: torch.Tensor) -> None:
    """Write `values[i]` to flat offset `destinations[i]` of `out`.

    Args:
        out: contiguous tensor of any shape, in place.
        destinations: int64 [num_values], each offset at most once.
        values: [num_values], the dtype of `out`.
    """
    num_values = values.shape[0]
    if num_values == 0:
        return
    if not can_run_triton(out.device):
        reference.scatter_values(out, destinations, values)
        return
    on_cpu = out.device.type == "cpu"
    block = _VALUES_PER_PROGRAM_INTERPRETED if on_cpu else _VALUES_PER_PROGRAM
    _scatter_values_kernel[(triton.cdiv(num_values, block),)](
        out, destinations, values, num_values, BLOCK=block
    )


if triton is not None:

    @triton.jit
    def _apply_trace_tokens_kernel(
        sampled_ptr,  # int64 [num_reqs]
        idx_mapping_ptr,  # int32 [num_reqs]
        all_token_ids_ptr,  # int32 [max_num_reqs, max_model_len]
        all_token_ids_stride,
        trace_len_ptr,  # int32 [max_num_reqs]
        total_len_ptr,  # int32 [max_num_reqs]
        prompt_len_ptr,  # int32 [max_num_reqs]
        num_reqs,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        slot = tl.load(idx_mapping_ptr + row, mask=row < num_reqs, other=-1)
        real = slot >= 0
        trace_len = tl.load(trace_len_ptr + slot, mask=real, other=0)
        total_len = tl.load(total_len_ptr + slot, mask=real, other=0)
        prompt_len = tl.load(prompt_len_ptr + slot, mask=real, other=0)
        # prompt_len + step is total_len; an unused slot has trace_len 0 and fails the second test.
        replayed = (total_len >= prompt_len) & (total_len < prompt_len + trace_len)
        # A slot times the row length passes 2^31 at 256 requests of 8M tokens, or 64k of 40k.
        offset = slot.to(tl.int64) * all_token_ids_stride + total_len
        token = tl.load(all_token_ids_ptr + offset, mask=replayed, other=0)
        tl.store(sampled_ptr + row, token, mask=replayed)

    @triton.jit
    def _apply_trace_tokens_to_verified_kernel(
        sampled_ptr,  # int64 [num_reqs, width]
        sampled_stride,
        num_sampled_ptr,  # int32 [num_reqs]
        draft_sampled_ptr,  # int32 [num_logits]
        cu_num_logits_ptr,  # int32 [num_reqs + 1]
        idx_mapping_ptr,  # int32 [num_reqs]
        all_token_ids_ptr,  # int32 [max_num_reqs, max_model_len]
        all_token_ids_stride,
        trace_len_ptr,  # int32 [max_num_reqs]
        total_len_ptr,  # int32 [max_num_reqs]
        prompt_len_ptr,  # int32 [max_num_reqs]
        num_reqs,
        width,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = row < num_reqs
        slot = tl.load(idx_mapping_ptr + row, mask=inside, other=-1)
        real = slot >= 0
        trace_len = tl.load(trace_len_ptr + slot, mask=real, other=0)
        total_len = tl.load(total_len_ptr + slot, mask=real, other=0)
        prompt_len = tl.load(prompt_len_ptr + slot, mask=real, other=0)
        first = tl.load(cu_num_logits_ptr + row, mask=inside, other=0)
        num_drafts = tl.load(cu_num_logits_ptr + row + 1, mask=inside, other=0) - first - 1
        base = total_len - prompt_len
        replayed = real & (base >= 0) & (base < trace_len)
        # The trace goes on in the row where the committed tokens end.
        trace_ptr = all_token_ids_ptr + slot.to(tl.int64) * all_token_ids_stride + total_len
        sampled_row_ptr = sampled_ptr + row.to(tl.int64) * sampled_stride
        writes = replayed
        num_written = tl.zeros([BLOCK], dtype=tl.int32)
        for i in range(width):
            writes = writes & (i <= num_drafts) & (base + i < trace_len)
            token = tl.load(trace_ptr + i, mask=writes, other=0)
            tl.store(sampled_row_ptr + i, token.to(tl.int64), mask=writes)
            num_written += writes.to(tl.int32)
            has_draft = writes & (i < num_drafts)
            draft = tl.load(draft_sampled_ptr + first + i + 1, mask=has_draft, other=-1)
            writes = has_draft & (draft == token)
        tl.store(num_sampled_ptr + row, num_written, mask=replayed)

    @triton.jit
    def _scatter_values_kernel(
        out_ptr,  # flat
        destinations_ptr,  # int64 [num_values]
        values_ptr,  # [num_values]
        num_values,
        BLOCK: tl.constexpr,
    ):
        index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = index < num_values
        destination = tl.load(destinations_ptr + index, mask=inside, other=0)
        value = tl.load(values_ptr + index, mask=inside, other=0)
        tl.store(out_ptr + destination, value, mask=inside)

    @triton.jit
    def _append_tokens_kernel(
        all_token_ids_ptr,  # int32 [max_num_reqs, max_model_len]
        all_token_ids_stride,
        total_len_ptr,  # int32 [max_num_reqs]
        slots_ptr,  # int32 [num_reqs]
        tokens_ptr,  # int64 [num_reqs]
        num_reqs,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = row < num_reqs
        slot = tl.load(slots_ptr + row, mask=inside, other=-1).to(tl.int64)
        real = slot >= 0
        length = tl.load(total_len_ptr + slot, mask=real, other=0)
        token = tl.load(tokens_ptr + row, mask=real, other=0).to(tl.int32)
        tl.store(all_token_ids_ptr + slot * all_token_ids_stride + length, token, mask=real)
        tl.store(total_len_ptr + slot, length + 1, mask=real)
