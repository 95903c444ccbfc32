"""Single tokens in their text, with both sides' view of them."""

from __future__ import annotations

import numpy as np

from trace_audit.diff.align import AlignedPair
from trace_audit.diff.columns import FloatArray, RunColumns
from trace_audit.diff.flips import TopChanges
from trace_audit.diff.kl import KLTerms
from trace_audit.diff.source import AuditSource
from trace_audit.diff.structure import place
from trace_audit.diff.summary import TokenDiff, TopChange, TopToken

_BEFORE_TOKENS = 24
_AFTER_TOKENS = 8


class TokenDetails:
    """Describes rows of one pair."""

    def __init__(
        self,
        source: AuditSource,
        pair: AlignedPair,
        kl: KLTerms | None,
        changes: TopChanges | None,
    ) -> None:
        """Describes rows of one pair.

        Args:
            source: Where texts come from.
            pair: The aligned runs.
            kl: Forward KL of each row, where it can be had.
            changes: Best-token changes, where they are known.
        """
        self._source = source
        self._pair = pair
        self._kl = kl
        self._changes = changes

    def token(self, row: int, *, context: bool = True) -> TokenDiff:
        """One row of the pair; without context, the text before and after it is empty."""
        pair, changes = self._pair, self._changes
        baseline, candidate = pair.baseline, pair.candidate
        before, after = self._context(row) if context else ("", "")
        return TokenDiff(
            place=place(pair, row),
            token_id=int(pair.token_id[row]),
            text=self._source.token_text(int(pair.token_id[row])),
            before=before,
            after=after,
            baseline_logprob=float(baseline.logprob[row]),
            candidate_logprob=float(candidate.logprob[row]),
            delta=float(pair.delta[row]),
            baseline_rank=_whole(baseline.rank, row),
            candidate_rank=_whole(candidate.rank, row),
            change=self._change(row),
            margin=_number(None if changes is None else changes.gap, row),
            candidate_margin=_number(None if changes is None else changes.candidate_gap, row),
            kl=_number(None if self._kl is None else self._kl.estimate, row),
            baseline_top=self._top(baseline, row),
            candidate_top=self._top(candidate, row),
            phase=None if candidate.phase is None else candidate.phase[row],
            launch=_launch(candidate, row),
        )

    def _context(self, row: int) -> tuple[str, str]:
        sequence = self._source.sequences[self._pair.sequence[row]]
        step = int(self._pair.step[row])
        prompt, output = sequence.prompt_token_ids, sequence.output_token_ids
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


def _launch(run: RunColumns, row: int) -> tuple[int, int, int] | None:
    if run.launch is None or np.isnan(run.launch[row]).any():
        return None
    tokens, requests, chunk_start = (int(value) for value in run.launch[row])
    return tokens, requests, chunk_start
