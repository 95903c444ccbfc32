"""Which drafts of a launch stay, and which of its rows are committed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from trace_audit.engine.batch import Batch
from trace_audit.engine.proposers import PLACEHOLDER
from trace_audit.engine.request_state import RequestState
from trace_audit.engine.scheduler import ScheduledRequest
from trace_audit.engine.trace_replay import TraceReplayState
from trace_audit.kernels.runtime import to_device

REJECTED = -1
"""In the place of a token that the launch computed from a rejected draft."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The B rows of a launch's logits as a matrix: a line a request, R of them.

    A request's first row follows its last committed token, each other one a draft.

    Attributes:
        width: columns of the matrix, 1 + the most drafts of a request.
        idx_mapping: int32 [R] on the device, line -> request slot.
        cu_num_logits: int32 [R + 1] on the device, where each line's rows start.
        line, column: int64 [B] on the device, each row's place in the matrix.
        draft_sampled: int32 [B] on the device, the token that each row follows.
        next_drafts: int64 [B] on the device, the draft in the place of each row's own token, -1
            where there is none.
    """

    width: int
    idx_mapping: torch.Tensor
    cu_num_logits: torch.Tensor
    line: torch.Tensor
    column: torch.Tensor
    draft_sampled: torch.Tensor
    next_drafts: torch.Tensor

    @classmethod
    def of(cls, batch: Batch, input_ids: torch.Tensor) -> Verification:
        """The matrix of a launch whose input ids, int64 [T], hold the drafts."""
        device = input_ids.device
        num_logits = np.array([s.num_logits for s in batch.scheduled], dtype=np.int64)
        starts = np.concatenate([[0], np.cumsum(num_logits)])
        line = np.repeat(np.arange(len(num_logits)), num_logits)
        is_last = np.zeros(len(line), dtype=np.bool_)
        is_last[starts[1:] - 1] = True
        slots = np.array([s.request.slot for s in batch.scheduled], dtype=np.int32)
        draft_sampled = input_ids[batch.logits_tokens]
        nothing = torch.full_like(draft_sampled, PLACEHOLDER)
        return cls(
            width=int(num_logits.max()),
            idx_mapping=to_device(slots, device),
            cu_num_logits=to_device(starts.astype(np.int32), device),
            line=to_device(line, device),
            column=to_device(np.arange(len(line)) - starts[line], device),
            draft_sampled=draft_sampled.int(),
            next_drafts=torch.where(to_device(is_last, device), nothing, draft_sampled.roll(-1)),
        )

    def verify(
        self, sampled: torch.Tensor, replay: TraceReplayState | None, state: RequestState
    ) -> torch.Tensor:
        """Decide what stays: a free request's sampled tokens, a replayed one's trace.

        A draft stays where all before it do and it is the token of its place. The first token that
        differs from its draft is the correction, and the last thing the launch says of the request.

        Args:
            sampled: int64 [B], overwritten in place where a row replays a trace.
            replay: None where no trace can be replayed.
            state: the request rows.

        Returns:
            bool [B], the rows that stay; at least the first of each request.
        """
        matrix = sampled.new_full((len(self.idx_mapping), self.width), REJECTED)
        matrix[self.line, self.column] = sampled
        matches = torch.zeros_like(matrix)
        matches[self.line, self.column] = (sampled == self.next_drafts).long()
        num_sampled = 1 + matches.cumprod(1).sum(1, dtype=torch.int32)
        if replay is not None:
            replay.apply_trace_to_verified(
                matrix, num_sampled, self.draft_sampled, self.cu_num_logits, self.idx_mapping, state
            )
        sampled.copy_(matrix[self.line, self.column])
        return self.column < num_sampled[self.line]


def committed_rows(batch: Batch, tokens: torch.Tensor) -> list[int]:
    """The rows of a launch whose tokens count, in order.

    Waits for the device only where the host cannot know: it has the traces, and drafts that no
    model made.

    Args:
        batch: the launch; its tokens are not committed yet.
        tokens: int64 [B], `REJECTED` where a draft before it is.
    """
    known = [(s, num) for s in batch.scheduled if (num := _num_known(s)) is not None]
    if len(known) == len(batch.scheduled):
        kept = [place < num for s, num in known for place in range(s.num_logits)]
    else:
        kept = tokens.ne(REJECTED).tolist()
    return [i for i, row in enumerate(batch.rows) if kept[i] and row.is_uncommitted]


def _num_known(scheduled: ScheduledRequest) -> int | None:
    """Tokens that a request keeps of a launch; None where its model or a draft model decides."""
    trace, drafts = scheduled.request.trace, scheduled.draft_token_ids
    if not drafts:
        return scheduled.num_logits
    if trace is None or PLACEHOLDER in drafts:
        return None
    places = zip(drafts, trace[len(scheduled.request.output_token_ids) :], strict=False)
    return 1 + next((i for i, (draft, token) in enumerate(places) if draft != token), len(drafts))
