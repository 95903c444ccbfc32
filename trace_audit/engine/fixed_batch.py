"""`fixed_batch`: what makes a sequence independent of the others in its launches.

A launch is one request's prefill chunk, or every decode row, padded to a fixed number. Then the
shape of a launch is a sequence's own affair, and what is left of the others are the values in
other rows, which no product or reduction over a row reads, and the place of a row among them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trace_audit.attention.base import AttentionBatch
from trace_audit.errors import ConfigError
from trace_audit.models.loaded import LoadedModel

# MKL shares the rows of a float32 product out over threads four at a time, and sums what does not
# fill four in another order: of 6 rows the last 2, of 10 on two threads as well.
_ROW_MULTIPLE = 8


def num_decode_rows(max_num_seqs: int) -> int:
    """Rows of every decode launch: `max_num_seqs` rounded up to a multiple of 8."""
    return -(-max_num_seqs // _ROW_MULTIPLE) * _ROW_MULTIPLE


def check_experts(loaded: LoadedModel) -> None:
    """Refuse experts whose products have as many rows as tokens were routed to them.

    Raises:
        ConfigError: the model has such experts.
    """
    model: Any = loaded.model
    has_experts = any("Experts" in type(module).__name__ for module in model.modules())
    backend = model.config.get_text_config()._experts_implementation
    one_by_one = backend == "batched_mm" and model._can_set_experts_implementation()
    if has_experts and not one_by_one:
        raise ConfigError(
            "fixed_batch = true, and an expert of this model multiplies the tokens that all "
            "sequences of a launch route to it together",
            hint='use moe_backend = "batched_mm", which multiplies each by itself, or '
            "fixed_batch = false",
        )


def check_rows(loaded: LoadedModel, *, num_rows: int, block_size: int) -> None:
    """Run one decode launch of equal rows, and refuse a machine that computes them unequally.

    Every rank calls this at the same time, before any request; it writes to the first KV block.

    Args:
        loaded: a model whose attention has its cache and backend.
        num_rows: of a decode launch.
        block_size: tokens of a KV block.

    Raises:
        ConfigError: what a row computes depends on its place among the rows.
    """
    device = next(loaded.model.parameters()).device
    # The last token of the first block, so that attention has zeros to weigh it against.
    places = torch.full((num_rows,), block_size - 1, dtype=torch.long, device=device)
    ones = np.ones(num_rows, dtype=np.int64)
    loaded.attention.prepare(
        AttentionBatch(
            query_lens=ones,
            context_lens=ones * block_size,
            block_table=np.zeros((num_rows, 1), dtype=np.int32),
            block_size=block_size,
            kv_slots=places,
            device=device,
        )
    )
    token_ids = torch.full_like(places, loaded.vocabulary_size // 2)
    with torch.inference_mode():
        logits = loaded.forward(token_ids, places, torch.arange(num_rows, device=device))
    if logits is None:
        return  # an earlier pipeline stage; what it computes shows in the last one's logits
    unequal = (logits != logits[0]) & ~(logits.isnan() & logits[0].isnan())
    if rows := unequal.any(1).nonzero().flatten().tolist():
        raise ConfigError(
            f"fixed_batch = true, and of {num_rows} equal rows this machine computes "
            f"{len(rows)} in another way than the first (row {rows[0]} is one)",
            hint="try another max_num_seqs or num_threads, or fixed_batch = false",
        )
