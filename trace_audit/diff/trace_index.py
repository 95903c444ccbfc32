"""The trace as flat arrays: what every run must have scored, and where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from trace_audit.storage.trace import TraceTokens


class TraceReader(Protocol):
    """A stored trace (``trace_audit.storage.trace_file.TraceFile``)."""

    def tokens(self) -> Iterator[TraceTokens]:
        """The tokens of every sequence, in order."""

    def support(self, ranges: Sequence[range]) -> Iterator[NDArray[np.int32]]:
        """Support ids of ascending ranges of sequences: int32 [T, 24] each, -1 where none."""

    def prompt(self, index: int) -> NDArray[np.int32]:
        """Prompt ids of one sequence."""


@dataclass(frozen=True, kw_only=True)
class TraceIndex:
    """Every output token of the trace, in (sequence, step) order; M tokens, S sequences.

    Support and prompts stay on the disk.

    Attributes:
        reader: Gives support and prompts.
        sequence_ids: S ids in trace order.
        group_ids: Distinct groups, in order of first appearance.
        sources: Source of each sequence.
        start: int64 [S + 1], flat index of each sequence's first token.
        prompt_length: int64 [S].
        group: int64 [S], index into ``group_ids`` of each sequence.
        token_id: int32 [M].
        scored: bool [M]; None where every token is.
        temperature: That sampled tokens were drawn at; None if not stated.
    """

    reader: TraceReader
    sequence_ids: tuple[str, ...]
    group_ids: tuple[str, ...]
    sources: tuple[str, ...]
    start: NDArray[np.int64]
    prompt_length: NDArray[np.int64]
    group: NDArray[np.int64]
    token_id: NDArray[np.int32]
    scored: NDArray[np.bool_] | None
    temperature: float | None = None

    def __len__(self) -> int:
        """Tokens, M."""
        return len(self.token_id)

    def sequence_of(self, flat: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sequence of some tokens: int64, as many."""
        return np.searchsorted(self.start, flat, side="right") - 1

    def place(self, flat: int) -> str:
        """A token, for messages."""
        sequence = int(self.sequence_of(np.array([flat]))[0])
        step = flat - int(self.start[sequence])
        return f"sequence {self.sequence_ids[sequence]!r}, step {step}"


def trace_index(reader: TraceReader, *, temperature: float | None = None) -> TraceIndex:
    """Flattens a trace of at least one sequence.

    Args:
        reader: Read once, to its end.
        temperature: That sampled tokens were drawn at.

    Raises:
        AuditDirError: The trace is damaged.
    """
    ids, groups, sources, prompts = [], [], [], []
    tokens: list[NDArray[np.int32]] = []
    masks: list[NDArray[np.bool_] | None] = []
    for sequence in reader.tokens():
        ids.append(sequence.sequence_id)
        groups.append(sequence.group_id)
        sources.append(sequence.source)
        prompts.append(len(sequence.prompt_token_ids))
        tokens.append(sequence.output_token_ids)
        masks.append(sequence.score_mask)
    number = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    lengths = np.array([len(output) for output in tokens], dtype=np.int64)
    return TraceIndex(
        reader=reader,
        sequence_ids=tuple(ids),
        group_ids=tuple(number),
        sources=tuple(sources),
        start=np.concatenate([[0], np.cumsum(lengths)]),
        prompt_length=np.array(prompts, dtype=np.int64),
        group=np.array([number[group] for group in groups], dtype=np.int64),
        token_id=np.concatenate(tokens).astype(np.int32, copy=False),
        scored=_scored(masks, lengths),
        temperature=temperature,
    )


def _scored(
    masks: Sequence[NDArray[np.bool_] | None], lengths: NDArray[np.int64]
) -> NDArray[np.bool_] | None:
    if all(mask is None for mask in masks):
        return None
    return np.concatenate(
        [
            np.ones(length, dtype=np.bool_) if mask is None else np.asarray(mask, dtype=np.bool_)
            for mask, length in zip(masks, lengths, strict=True)
        ]
    )
