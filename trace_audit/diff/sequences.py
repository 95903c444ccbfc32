"""Whole sequences in their text: which of them a report shows, and every token of those."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from trace_audit.diff.align import AlignedPair
from trace_audit.diff.columns import FloatArray
from trace_audit.diff.compare import Comparison
from trace_audit.diff.source import AuditSource
from trace_audit.diff.summary import TokenDiff

MAX_STEPS = 2048
_PROMPT_TOKENS = 256
_NON_FINITE = 1e6

Chosen = Literal["worst", "first"]


@dataclass(frozen=True, kw_only=True)
class TextToken:
    """One output token of a shown sequence.

    Attributes:
        ends_line: Its bytes end with a newline.
        diff: None where the score mask leaves the token out.
    """

    step: int
    token_id: int
    text: str
    ends_line: bool
    diff: TokenDiff | None


@dataclass(frozen=True, kw_only=True)
class SequenceText:
    """One sequence of the trace, or the part of a long one where |delta| is largest.

    Attributes:
        index: Of the sequence in the trace.
        chosen: Why it is shown.
        prompt: Text of the last prompt tokens; empty when redacted.
        prompt_tokens: Length of the whole prompt.
        prompt_left_out: Prompt tokens before ``prompt``.
        output_tokens: Length of the whole output.
        tokens: Consecutive output tokens.
        sum_abs_delta: Of all its scored tokens, nats; infinite if one is not finite.
    """

    index: int
    sequence_id: str
    chosen: Chosen
    prompt: str
    prompt_tokens: int
    prompt_left_out: int
    output_tokens: int
    tokens: tuple[TextToken, ...]
    sum_abs_delta: float


def sums_of_abs_delta(pair: AlignedPair) -> FloatArray:
    """Summed |delta| of each of the trace's S sequences, nats: float64 [S].

    Infinite where a row is not finite; NaN for a sequence that was not compared.
    """
    size = np.where(pair.finite, np.abs(pair.delta), np.inf)
    count = len(pair.trace.sequence_ids)
    sums = np.bincount(pair.sequence, weights=size, minlength=count).astype(np.float64)
    sums[np.bincount(pair.sequence, minlength=count) == 0] = np.nan
    return sums


def choose_sequences(pair: AlignedPair, count: int) -> list[tuple[int, Chosen]]:
    """At most ``count`` sequences: the worst by summed |delta|, and the first of the trace.

    Worst first, equal ones in trace order. The first comes last unless it is among the worst; a
    single place goes to the worst. Sequences without any difference are not "worst".
    """
    sums = sums_of_abs_delta(pair)
    order = np.argsort(-sums, kind="stable")
    worst = [int(i) for i in order if sums[i] > 0][:count]
    chosen: list[tuple[int, Chosen]] = [(i, "worst") for i in worst]
    first = int(pair.sequence[0])
    if first not in worst and (count > 1 or not worst):
        chosen = [*chosen[: count - 1], (first, "first")]
    return chosen


def window(size: FloatArray, width: int) -> tuple[int, int]:
    """Start and end of the ``width`` consecutive steps with the largest sum; the first of equals.

    Args:
        size: |delta| by step, finite: float64 [T].
        width: At least 1.
    """
    if len(size) <= width:
        return 0, len(size)
    total = np.concatenate([[0.0], np.cumsum(size)])
    start = int(np.argmax(total[width:] - total[:-width]))
    return start, start + width


def sequence_text(
    source: AuditSource, comparison: Comparison, index: int, chosen: Chosen, *, max_steps: int
) -> SequenceText:
    """One sequence with both sides' view of its tokens.

    Args:
        source: Of the comparison.
        comparison: The pair.
        index: Of the sequence in the trace.
        chosen: Why it is shown.
        max_steps: Output tokens shown at most.
    """
    pair, ids = comparison.pair, source.text_of(index)
    rows = np.arange(pair.first_row[index], pair.first_row[index + 1])
    length = len(ids.output)
    size = np.zeros(length)
    # Non-finite rows draw the window to themselves.
    size[pair.step[rows]] = np.where(pair.finite[rows], np.abs(pair.delta[rows]), _NON_FINITE)
    start, end = window(size, max_steps)
    shown = rows[(pair.step[rows] >= start) & (pair.step[rows] < end)]
    tokens = comparison.details.tokens(shown.tolist(), context=False)
    diffs = {token.place.step: token for token in tokens}
    return SequenceText(
        index=index,
        sequence_id=pair.trace.sequence_ids[index],
        chosen=chosen,
        prompt=source.joined_text(ids.prompt[-_PROMPT_TOKENS:]),
        prompt_tokens=len(ids.prompt),
        prompt_left_out=max(0, len(ids.prompt) - _PROMPT_TOKENS),
        output_tokens=length,
        tokens=tuple(
            TextToken(
                step=step,
                token_id=token_id,
                text=source.token_text(token_id),
                ends_line=source.ends_line(token_id),
                diff=diffs.get(step),
            )
            for step, token_id in enumerate(ids.output[start:end].tolist(), start)
        ),
        sum_abs_delta=float(sums_of_abs_delta(pair)[index]),
    )
