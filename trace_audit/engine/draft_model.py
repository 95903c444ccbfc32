"""A smaller model that drafts, over the same KV blocks as the model it drafts for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trace_audit.attention.base import AttentionBackend
from trace_audit.attention.kv_cache import KVCache
from trace_audit.engine.batch import Batch, build_batch
from trace_audit.engine.request_state import RequestState
from trace_audit.engine.scheduler import ScheduledRequest
from trace_audit.kernels.runtime import to_device
from trace_audit.models.loaded import LoadedModel
from trace_audit.models.loader import causal_forward


class DraftModel:
    """Drafts greedily, a token of every request a pass.

    Its keys and values stand in blocks of the same ids as the target's, and it computes what the
    target computes, so its cache holds a request exactly where the target's does: after chunks,
    rejected drafts and preemption alike.

    Args:
        loaded: a whole model of the target's vocabulary, on the rank that samples.
        backend: attention of its own.
        num_blocks, block_size: of the KV cache, as the target's.
    """

    def __init__(
        self, *, loaded: LoadedModel, backend: AttentionBackend, num_blocks: int, block_size: int
    ) -> None:
        parameter = next(loaded.model.parameters())
        self._loaded = loaded
        self._decoder = causal_forward(loaded.model, has_head=False)
        self._block_size = block_size
        self._device = parameter.device
        self.kv_cache = KVCache(
            loaded.layers,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=parameter.dtype,
            device=self._device,
        )
        loaded.attention.bind(self.kv_cache, backend)

    def draft(self, scheduled: Sequence[ScheduledRequest], state: RequestState) -> torch.Tensor:
        """The drafts of a launch, int64 [D], in the order of its placeholders.

        Args:
            scheduled: the launch's requests; their blocks are there.
            state: the request rows.
        """
        drafted = [s for s in scheduled if s.draft_token_ids]
        counts = np.array([len(s.draft_token_ids) for s in drafted])
        drafts = torch.zeros(len(drafted), counts.max(), dtype=torch.long, device=self._device)
        for place in range(counts.max()):
            going = np.flatnonzero(counts > place)
            lines = to_device(going, self._device)
            batch = build_batch(
                [_one_token(drafted[line], place) for line in going],
                block_size=self._block_size,
                device=self._device,
            )
            if place == 0:
                ids = state.gather_input_ids(batch.token_slots, batch.positions)
            else:
                ids = drafts[lines, place - 1]
            self._loaded.attention.prepare(batch.attention)
            logits = self._loaded.forward(ids, batch.positions, batch.logits_tokens)
            assert logits is not None
            drafts[lines, place] = logits.argmax(-1)
        is_draft = np.arange(counts.max()) < counts[:, None]
        return drafts.flatten()[to_device(np.flatnonzero(is_draft), self._device)]

    def follow(self, batch: Batch, input_ids: torch.Tensor) -> None:
        """Write keys and values of everything that the target computes in a launch."""
        self._loaded.attention.prepare(batch.attention)
        self._decoder(input_ids, batch.positions, batch.logits_tokens)


def _one_token(scheduled: ScheduledRequest, place: int) -> ScheduledRequest:
    """A request's next token, or the draft in a place behind it, as a launch of its own."""
    return ScheduledRequest(
        request=scheduled.request, chunk_start=scheduled.chunk_start + place, num_tokens=1
    )
