"""Persistent per-slot rows on the device, joined to a step's batch by `idx_mapping`."""

from __future__ import annotations

import torch

from trace_audit.engine.buffers import StagedWriteTensor, UvaBackedTensor
from trace_audit.engine.request import Request
from trace_audit.kernels.trace_replay import append_tokens


class RequestState:
    """Token rows and lengths of every request slot.

    Slots are handed out lowest first. A replayed request's row holds prompt, committed outputs
    and, on the rank that samples, the trace's unconsumed rest; only the overwrite kernel may read
    past `total_len`.

    Args:
        max_num_reqs: slots.
        max_model_len: longest sequence.
        device: of the rows.
        holds_traces: whether this rank samples, so that rows hold traces.
        fixed_addresses: see `UvaBackedTensor`.

    Attributes:
        all_token_ids: int32 [max_num_reqs, max_model_len].
        prompt_len: int32 [max_num_reqs].
        total_len: int32 [max_num_reqs, 1], prompt and committed output tokens; advanced on the
            device, so that a replay's step never depends on a host counter.
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        device: torch.device,
        *,
        holds_traces: bool = True,
        fixed_addresses: bool = False,
    ) -> None:
        self._holds_traces = holds_traces
        self.all_token_ids = StagedWriteTensor(
            max_num_reqs, max_model_len, dtype=torch.int32, device=device
        )
        self.prompt_len = UvaBackedTensor(
            max_num_reqs, dtype=torch.int32, device=device, fixed_address=fixed_addresses
        )
        self.total_len = StagedWriteTensor(max_num_reqs, 1, dtype=torch.int32, device=device)
        self._free_slots = list(range(max_num_reqs - 1, -1, -1))
        self._changed = False

    def add_request(self, request: Request) -> None:
        """Give `request` a slot and stage its rows; the outputs it has count as prefill."""
        slot = self._free_slots.pop()
        request.slot = slot
        num_outputs = len(request.output_token_ids)
        unconsumed = request.trace[num_outputs:] if request.trace and self._holds_traces else []
        row = [*request.prompt_token_ids, *request.output_token_ids, *unconsumed]
        self.all_token_ids.stage_write(slot, 0, row)
        self.prompt_len.np[slot] = request.prompt_len
        self.total_len.stage_write(slot, 0, [request.total_len])
        self._changed = True

    def apply_staged_writes(self) -> None:
        """Flush what `add_request` staged, one launch a matrix."""
        if not self._changed:
            return
        self.all_token_ids.apply_writes()
        self.total_len.apply_writes()
        self.prompt_len.copy_to_uva()
        self._changed = False

    def remove_request(self, request: Request) -> None:
        """Free the request's slot; the row's contents stay until the slot is taken again."""
        self._free_slots.append(request.slot)
        # Lowest slot first, whatever order requests end in.
        self._free_slots.sort(reverse=True)
        request.slot = -1

    def gather_input_ids(self, token_slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Token ids of a flat batch, int64 [num_tokens], read from the rows on the device.

        Where the slot is -1, which is padding, the id is 0.
        """
        token_ids = self.all_token_ids.gpu[token_slots, positions].long()
        return torch.where(token_slots < 0, 0, token_ids)

    def append_one_each(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Append a token, int64 [n], to the row of each slot, int32 [n]; -1 is padding."""
        append_tokens(self.all_token_ids.gpu, self.total_len.gpu.view(-1), slots, tokens)

    def append_tokens(
        self, slots: torch.Tensor, offsets: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        """Append tokens to the rows of slots.

        Args:
            slots: int64 [n].
            offsets: int64 [n], 0 for a slot's first token here, 1 for its second.
            tokens: int64 [n].
        """
        total_len = self.total_len.gpu[:, 0]
        self.all_token_ids.gpu[slots, total_len[slots] + offsets] = tokens.int()
        total_len.index_add_(0, slots, torch.ones_like(slots, dtype=torch.int32))
