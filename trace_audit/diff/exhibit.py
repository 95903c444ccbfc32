"""What only a page with room for it shows of a pair: distributions, and sequences in their text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trace_audit.diff.bootstrap import Resampler
from trace_audit.diff.compare import Comparison
from trace_audit.diff.distributions import (
    ConfidenceBucket,
    Histogram,
    confidence_buckets,
    histogram,
)
from trace_audit.diff.sequences import MAX_STEPS, SequenceText, choose_sequences, sequence_text
from trace_audit.diff.source import AuditSource

NUM_SEQUENCES = 8
# Bounds a page of many candidates: a token takes about 400 bytes of it.
TOKEN_BUDGET = 20_000


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """More of one pair than its summary holds.

    Attributes:
        confidence: None where the baseline lacks its best tokens.
        sequences: Worst first; none where the pair is bitwise.
        left_out: Compared sequences that are not among them.
        sequence_indices: Index in the trace of each sequence that the summary's tokens are from.
    """

    histogram: Histogram
    confidence: tuple[ConfidenceBucket, ...] | None
    sequences: tuple[SequenceText, ...]
    left_out: int
    sequence_indices: Mapping[str, int]


def exhibit(
    source: AuditSource,
    comparison: Comparison,
    *,
    page_comparisons: int = 1,
    num_sequences: int | None = None,
    max_steps: int = MAX_STEPS,
) -> Exhibit:
    """The exhibit of a comparison.

    Args:
        source: Of the comparison.
        comparison: A pair, read by now.
        page_comparisons: Comparisons that share the page, this one included.
        num_sequences: Sequences shown. None: up to 8, as long as the tokens of all comparisons
            together are no more than 20,000, but at least one.
        max_steps: Output tokens shown of a sequence.
    """
    room = None if num_sequences is not None else TOKEN_BUDGET // page_comparisons
    count = NUM_SEQUENCES if num_sequences is None else num_sequences
    pair, summary = comparison.pair, comparison.summary
    lengths = np.diff(pair.trace.start)
    shown: list[SequenceText] = []
    for index, chosen in [] if summary.bitwise else choose_sequences(pair, count):
        length = min(int(lengths[index]), max_steps)
        if room is not None:
            if shown and length > room:
                continue
            room -= length
        shown.append(sequence_text(source, comparison, index, chosen, max_steps=max_steps))
    return Exhibit(
        histogram=histogram(pair),
        confidence=confidence_buckets(pair, Resampler(len(pair.group_ids))),
        sequences=tuple(shown),
        left_out=summary.sequences - len(shown),
        sequence_indices=_indices(comparison),
    )


def _indices(comparison: Comparison) -> dict[str, int]:
    tokens = (*comparison.summary.worst, *comparison.summary.flips.examples)
    ids = comparison.pair.trace.sequence_ids
    return {token.place.sequence_id: ids.index(token.place.sequence_id) for token in tokens}
