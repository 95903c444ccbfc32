"""State of replayed requests: one length a slot; their tokens live in the request's own row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from trace_audit.engine.buffers import UvaBackedTensor
from trace_audit.engine.request import Request
from trace_audit.engine.request_state import RequestState
from trace_audit.kernels import trace_replay


class TraceKernels(Protocol):
    """The two overwrites, as Triton kernels or as their references."""

    @property
    def apply_trace_tokens(self) -> Callable[..., None]:
        """See `trace_audit.kernels.trace_replay.apply_trace_tokens`."""

    @property
    def apply_trace_tokens_to_verified(self) -> Callable[..., None]:
        """See `trace_audit.kernels.trace_replay.apply_trace_tokens_to_verified`."""


class TraceReplayState:
    """Which slots replay a trace, and how long it is.

    Exists only where `enable_trace_replay` is true and this rank samples.

    Args:
        max_num_reqs: request slots.
        device: of the request rows.
        kernels: the overwrites.
        fixed_addresses: see `UvaBackedTensor`.

    Attributes:
        trace_len: int32 [max_num_reqs], 0 for a request without a trace.
    """

    def __init__(
        self,
        max_num_reqs: int,
        device: torch.device,
        kernels: TraceKernels = trace_replay,
        *,
        fixed_addresses: bool = False,
    ) -> None:
        self._kernels = kernels
        self.trace_len = UvaBackedTensor(
            max_num_reqs, dtype=torch.int32, device=device, fixed_address=fixed_addresses
        )
        self._changed = False

    def add_request(self, request: Request) -> None:
        """Take note of the slot's trace; a free request resets what its slot held before."""
        self.trace_len.np[request.slot] = 0 if request.trace is None else len(request.trace)
        self._changed = True

    def apply_staged_writes(self) -> None:
        """Publish changed lengths to the device."""
        if self._changed:
            self.trace_len.copy_to_uva()
            self._changed = False

    def remove_request(self, request: Request) -> None:
        """Forget the slot's trace."""
        self.trace_len.np[request.slot] = 0
        self._changed = True

    def apply_trace(
        self, sampled: torch.Tensor, idx_mapping: torch.Tensor, state: RequestState
    ) -> None:
        """Overwrite `sampled` (int64 [num_reqs]) in place for the rows that replay."""
        if not self.trace_len.np.any():
            return
        self._kernels.apply_trace_tokens(
            sampled,
            idx_mapping,
            state.all_token_ids.gpu,
            self.trace_len.gpu,
            state.total_len.gpu.view(-1),
            state.prompt_len.gpu,
        )

    def apply_trace_to_verified(
        self,
        sampled: torch.Tensor,
        num_sampled: torch.Tensor,
        draft_sampled: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        state: RequestState,
    ) -> None:
        """Overwrite `sampled` and `num_sampled` in place for the rows that replay.

        The arguments are those of `apply_trace_tokens_to_verified`.
        """
        if not self.trace_len.np.any():
            return
        self._kernels.apply_trace_tokens_to_verified(
            sampled,
            num_sampled,
            draft_sampled,
            cu_num_logits,
            idx_mapping,
            state.all_token_ids.gpu,
            self.trace_len.gpu,
            state.total_len.gpu.view(-1),
            state.prompt_len.gpu,
        )
