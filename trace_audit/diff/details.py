"""Single tokens in their text, with both sides' view of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trace_audit.diff.align import AlignedPair
from trace_audit.diff.batches import AlignedBatch, aligned_batches
from trace_audit.diff.columns import FloatArray, RunColumns
from trace_audit.diff.flips import TopChanges
from trace_audit.diff.router_totals import RouterTotals
from trace_audit.diff.source import AuditSource, SequenceTokens
from trace_audit.diff.structure import place
from trace_audit.diff.summary import TokenDiff, TopChange, TopToken
from trace_audit.storage.schema import PHASES

_BEFORE_TOKENS = 24
_AFTER_TOKENS = 8
_SHOWN = (
    "phase",
    "rank",
    "top_token_ids",
    "top_logprobs",
    "launch_tokens",
    "launch_requests",
    "chunk_start",
)


class TokenDetails:
    """Describes rows of one pair; what is not kept of them is read again."""

    def __init__(self, source: AuditSource, pair: AlignedPair, changes: TopChanges | None) -> None:
        """Describes rows of one pair.

        Args:
            source: Where texts come from.
            pair: The aligned runs.
            changes: Best-token changes, where they are known.
        """
        self._source = source
        self._pair = pair
        self._changes = changes

    def tokens(self, rows: Sequence[int], *, context: bool = True) -> list[TokenDiff]:
        """Some rows of the pair, in that order; without context, before and after are empty."""
        pair = self._pair
        sequences = sorted({int(pair.sequence[row]) for row in rows})
        batches = aligned_batches(pair, columns=_SHOWN, sides_only=True, sequences=sequences)
        found: dict[int, TokenDiff] = {}
        for index, batch in zip(sequences, batches, strict=True):
            text = self._source.text_of(index) if context else None
            for row in rows:
                if batch.rows.start <= row < batch.rows.stop:
                    found[row] = self._token(row, batch, text)
        return [found[row] for row in rows]

    def _token(self, row: int, batch: AlignedBatch, text: SequenceTokens | None) -> TokenDiff:
        pair, changes = self._pair, self._changes
        baseline, candidate = batch.baseline, batch.candidate
        at = row - batch.rows.start
        where = place(pair, row)
        token_id = pair.trace.token_id[pair.trace.start[pair.sequence[row]] + where.step]
        before, after = ("", "") if text is None else self._context(text, where.step)
        return TokenDiff(
            place=where,
            token_id=int(token_id),
            text=self._source.token_text(int(token_id)),
            before=before,
            after=after,
            baseline_logprob=float(baseline.logprob[at]),
            candidate_logprob=float(candidate.logprob[at]),
            delta=float(pair.delta[row]),
            baseline_rank=_whole(baseline.rank, at),
            candidate_rank=_whole(candidate.rank, at),
            change=self._change(row),
            margin=_number(None if changes is None else changes.gap, row),
            candidate_margin=_number(None if changes is None else changes.candidate_gap, row),
            kl=_number(pair.kl.estimate, row),
            baseline_top=self._top(baseline, at),
            candidate_top=self._top(candidate, at),
            phase=_phase(candidate, at),
            launch=_launch(candidate, at),
            routers_changed=(
                int(pair.router.changed[row]) if isinstance(pair.router, RouterTotals) else None
            ),
        )

    def _context(self, text: SequenceTokens, step: int) -> tuple[str, str]:
        prompt, output = text.prompt, text.output
        earlier = [*prompt[max(0, len(prompt) + step - _BEFORE_TOKENS) :], *output[:step]]
        later = output[step + 1 : step + 1 + _AFTER_TOKENS]
        joined = self._source.joined_text
        return joined(earlier[-_BEFORE_TOKENS:]), joined(later)

    def _change(self, row: int) -> TopChange:
        changes = self._changes
        if changes is None or not changes.known[row]:
            return "unknown"
        if changes.hard is not None and changes.hard[row]:
            return "hard flip"
        if changes.flip[row]:
            return "flip"
        return "tie change" if changes.tie_change[row] else "none"

    def _top(self, run: RunColumns, row: int) -> tuple[TopToken, ...]:
        if run.top_token_ids is None or run.top_logprobs is None:
            return ()
        pairs = zip(run.top_token_ids[row].tolist(), run.top_logprobs[row].tolist(), strict=True)
        return tuple(
            TopToken(token_id=token_id, text=self._source.token_text(token_id), logprob=logprob)
            for token_id, logprob in pairs
            if token_id >= 0
        )


def _number(values: FloatArray | None, row: int) -> float | None:
    if values is None or np.isnan(values[row]):
        return None
    return float(values[row])


def _whole(values: FloatArray | None, row: int) -> int | None:
    number = _number(values, row)
    return None if number is None else int(number)


def _phase(run: RunColumns, row: int) -> str | None:
    return None if run.phase is None or run.phase[row] < 0 else PHASES[run.phase[row]]


def _launch(run: RunColumns, row: int) -> tuple[int, int, int] | None:
    if run.launch is None or np.isnan(run.launch[row]).any():
        return None
    tokens, requests, chunk_start = (int(value) for value in run.launch[row])
    return tokens, requests, chunk_start
