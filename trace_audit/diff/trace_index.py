"""The trace as flat arrays: what every run must have scored, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from trace_audit.storage.trace import TraceSequence


@dataclass(frozen=True, kw_only=True)
class TraceIndex:
    """Every output token of the trace, in (sequence, step) order; M tokens, S sequences.

    Attributes:
        sequence_ids: S ids in trace order.
        group_ids: Distinct groups, in order of first appearance.
        sources: Source of each sequence.
        start: int64 [S + 1], flat index of each sequence's first token.
        sequence: int64 [M], sequence of each token.
        group: int64 [M], index into ``group_ids``.
        step: int64 [M].
        position: int64 [M], prompt length + step.
        token_id: int64 [M].
        scored: bool [M].
        support_token_ids: int64 [M, S], -1 where none.
        temperature: That sampled tokens were drawn at; None if not stated.
    """

    sequence_ids: tuple[str, ...]
    group_ids: tuple[str, ...]
    sources: tuple[str, ...]
    start: NDArray[np.int64]
    sequence: NDArray[np.int64]
    group: NDArray[np.int64]
    step: NDArray[np.int64]
    position: NDArray[np.int64]
    token_id: NDArray[np.int64]
    scored: NDArray[np.bool_]
    support_token_ids: NDArray[np.int64]
    temperature: float | None = None

    def __len__(self) -> int:
        """Tokens, M."""
        return len(self.token_id)


def trace_index(
    sequences: Sequence[TraceSequence], *, temperature: float | None = None
) -> TraceIndex:
    """Flattens a trace.

    Args:
        sequences: At least one.
        temperature: That sampled tokens were drawn at.
    """
    lengths = np.array([len(s.output_token_ids) for s in sequences], dtype=np.int64)
    prompts = np.array([len(s.prompt_token_ids) for s in sequences], dtype=np.int64)
    start = np.concatenate([[0], np.cumsum(lengths)])
    sequence = np.repeat(np.arange(len(sequences)), lengths)
    step = np.arange(len(sequence)) - start[sequence]
    groups = {group: i for i, group in enumerate(dict.fromkeys(s.group_id for s in sequences))}
    group = np.array([groups[s.group_id] for s in sequences], dtype=np.int64)
    return TraceIndex(
        sequence_ids=tuple(s.sequence_id for s in sequences),
        group_ids=tuple(groups),
        sources=tuple(s.source for s in sequences),
        start=start,
        sequence=sequence,
        group=group[sequence],
        step=step,
        position=prompts[sequence] + step,
        token_id=np.concatenate([s.output_token_ids for s in sequences]).astype(np.int64),
        scored=np.concatenate([_mask(s) for s in sequences]),
        support_token_ids=np.concatenate([s.support_token_ids for s in sequences]).astype(np.int64),
        temperature=temperature,
    )


def _mask(sequence: TraceSequence) -> NDArray[np.bool_]:
    if sequence.score_mask is None:
        return np.ones(len(sequence.output_token_ids), dtype=np.bool_)
    return np.asarray(sequence.score_mask, dtype=np.bool_)
