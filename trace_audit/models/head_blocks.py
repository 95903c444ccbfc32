"""Logits of many rows, a block of them at a time: [length, vocabulary] never exists at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trace_audit.models.loaded import LoadedModel


def logits_in_blocks(
    loaded: LoadedModel,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    block_size: int,
) -> Iterator[torch.Tensor | None]:
    """Run a flat batch through the decoder once, and through the head block by block.

    Each block is the model's own forward, so what it does after the head (soft-capping, a logit
    scale) is done; its decoder answers from the second block on with what it computed for the
    first.

    Args:
        loaded: the model, or a rank's share of it.
        input_ids: int64 [T].
        positions: int64 [T].
        rows: int64 [B], B >= 1, whose logits are wanted.
        block_size: most rows of a block.

    Yields:
        Logits [b, V] of the next b rows, to be let go before the next are asked for; None where
        the model ends before its head.
    """
    with _computed_once(loaded.model.get_decoder()):  # type: ignore[operator]
        for block in rows.split(block_size):
            yield loaded.forward(input_ids, positions, block)


@contextmanager
def _computed_once(decoder: torch.nn.Module) -> Iterator[None]:
    """Within, the decoder computes when it is called first, and remembers."""
    own = vars(decoder).get("forward")  # where it is not the class's
    compute = decoder.forward
    given: list[Any] = []

    def remembered(*args: Any, **kwargs: Any) -> Any:
        if not given:
            given.append(compute(*args, **kwargs))
        return given[0]

    decoder.forward = remembered
    try:
        yield
    finally:
        if own is None:
            del decoder.forward
        else:
            decoder.forward = own
