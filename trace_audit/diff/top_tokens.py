"""Best tokens of two runs: what is kept of them, a batch at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trace_audit.diff.batches import AlignedBatch
from trace_audit.diff.columns import FloatArray, IdArray, RunColumns
from trace_audit.diff.pair_rows import PairRows
from trace_audit.diff.run_rows import RunRows

MANTISSA_BITS = {"float32": 23, "bfloat16": 7, "float16": 10}
_BEST = {"top_token_ids", "top_logprobs"}


@dataclass(frozen=True, kw_only=True)
class TopTokens:
    """The best tokens of both runs at each of N positions.

    Attributes:
        known: bool, both runs' best tokens are known and the row is finite.
        flip: bool, the best token changed and neither side has a tie between the two.
        tie_change: bool, the best token changed otherwise.
        gap: float64, the baseline's gap between its own best two ids, nats; NaN if unknown.
        candidate_gap: float64, the candidate's gap between those same ids, signed.
        baseline_ulp: float, unit in the last place of the stored logits at the top logit, a power
            of two; None where the run's logit dtype is not known.
        candidate_ulp: That of the candidate.
    """

    known: NDArray[np.bool_]
    flip: NDArray[np.bool_]
    tie_change: NDArray[np.bool_]
    gap: FloatArray
    candidate_gap: FloatArray
    baseline_ulp: NDArray[np.floating] | None = None
    candidate_ulp: NDArray[np.floating] | None = None


class TopCollector:
    """Fills :class:`TopTokens`."""

    def __init__(self, rows: PairRows) -> None:
        """Of no rows yet."""
        self._runs = (rows.baseline_run, rows.candidate_run)
        self._found: TopTokens | None = None
        # A run has best tokens of its own where it lists two of some row.
        self._has_two = [False, False]
        if all(run.columns >= _BEST for run in self._runs):
            size = len(rows)
            self._found = TopTokens(
                known=np.zeros(size, dtype=np.bool_),
                flip=np.zeros(size, dtype=np.bool_),
                tie_change=np.zeros(size, dtype=np.bool_),
                gap=np.full(size, np.nan),
                candidate_gap=np.full(size, np.nan),
                baseline_ulp=_no_ulp(self._runs[0], size),
                candidate_ulp=_no_ulp(self._runs[1], size),
            )

    def add(self, batch: AlignedBatch) -> None:
        """The next rows."""
        found = self._found
        if found is None:
            return
        baseline, candidate = batch.baseline, batch.candidate
        for side, run in enumerate((baseline, candidate)):
            assert run.top_token_ids is not None
            self._has_two[side] |= run.top_token_ids.shape[1] >= 2
        (ids_a, best_a), (ids_b, best_b) = _best_two(baseline), _best_two(candidate)
        support = batch.support_token_ids
        in_b = [logprob_at(ids_a[:, i], candidate, support) for i in (0, 1)]
        known = batch.finite & np.isfinite(best_a[:, 0]) & np.isfinite(best_b[:, 0])
        changed = np.flatnonzero(known & (ids_a[:, 0] != ids_b[:, 0]))
        some_a, some_b = _some_tops(baseline, changed), _some_tops(candidate, changed)
        in_a = logprob_at(ids_b[changed, 0], some_a, support[changed])
        strict = _strictly_below(in_b[0][changed], some_b) & _strictly_below(in_a, some_a)
        rows = batch.rows
        found.known[rows] = known
        found.flip[rows.start + changed[strict]] = True
        found.tie_change[rows.start + changed[~strict]] = True
        with np.errstate(invalid="ignore"):
            found.gap[rows] = np.where(known, best_a[:, 0] - best_a[:, 1], np.nan)
            found.candidate_gap[rows] = np.where(known, in_b[0] - in_b[1], np.nan)
        for run, located, ulp in (
            (baseline, self._runs[0], found.baseline_ulp),
            (candidate, self._runs[1], found.candidate_ulp),
        ):
            if ulp is not None:
                ulp[rows] = _ulp(run, str(located.logit_dtype))

    def result(self) -> TopTokens | None:
        """Of all rows; None where a run does not have its own best tokens."""
        return self._found if all(self._has_two) else None


def logprob_at(ids: IdArray, run: RunColumns, support_token_ids: IdArray) -> FloatArray:
    """A run's logprob at one id per position, from its own best and the trace's support.

    Args:
        ids: int32 [N].
        run: With its own best tokens.
        support_token_ids: int32 [N, S].

    Returns:
        float64 [N], NaN where the id is in neither list.
    """
    found = np.full(len(ids), np.nan)
    left = np.flatnonzero(ids >= 0)
    # The best few first: nearly all are among them.
    lists = [(run.top_token_ids, run.top_logprobs), (support_token_ids, run.support_logprobs)]
    for list_ids, logprobs in lists:
        if list_ids is None or logprobs is None or not list_ids.shape[1] or not len(left):
            continue
        match = list_ids[left] == ids[left, None]
        column = np.argmax(match, axis=1)
        inside = match[np.arange(len(left)), column]
        found[left[inside]] = logprobs[left[inside], column[inside]]
        left = left[~inside]
    return found


def unit_in_last_place(logits: FloatArray, dtype: str) -> FloatArray:
    """Spacing of a float format's values at each logit: float64 [N].

    Args:
        logits: float64 [N].
        dtype: float32, bfloat16 or float16.
    """
    exponent = np.frexp(np.maximum(np.abs(logits), np.finfo(np.float32).tiny))[1] - 1
    spacing: FloatArray = np.ldexp(1.0, exponent - MANTISSA_BITS[dtype])
    return spacing


def _best_two(run: RunColumns) -> tuple[IdArray, FloatArray]:
    """The two best ids and their logprobs, -1 and NaN where there are not two: [N, 2] each."""
    ids, logprobs = run.top_token_ids, run.top_logprobs
    assert ids is not None
    assert logprobs is not None
    missing = max(0, 2 - ids.shape[1]), max(0, 2 - logprobs.shape[1])
    return (
        np.pad(ids[:, :2], ((0, 0), (0, missing[0])), constant_values=-1),
        np.pad(
            logprobs[:, :2].astype(np.float64), ((0, 0), (0, missing[1])), constant_values=np.nan
        ),
    )


def _some_tops(run: RunColumns, rows: NDArray[np.int64]) -> RunColumns:
    """What is looked up of the best tokens, at some rows."""
    looked_up = RunColumns(
        logprob=run.logprob,
        top_token_ids=run.top_token_ids,
        top_logprobs=run.top_logprobs,
        support_logprobs=run.support_logprobs,
    )
    return looked_up.take(rows)


def _strictly_below(logprob: FloatArray, run: RunColumns) -> NDArray[np.bool_]:
    """Whether a logprob is under the run's maximum.

    An id that is in no list is at most as good as the run's last stored best, so it is under the
    maximum unless all stored ones tie; then nothing is known and the change is not called a flip.
    """
    assert run.top_logprobs is not None
    best = run.top_logprobs[:, 0]
    # Lists are best first, and NaN where a list is shorter than others.
    last = np.fmin.reduce(run.top_logprobs, axis=1)
    return np.where(np.isnan(logprob), last < best, logprob < best)


def _no_ulp(run: RunRows, size: int) -> NDArray[np.float32] | None:
    if run.logit_dtype is None or "logsumexp" not in run.columns:
        return None
    return np.zeros(size, dtype=np.float32)


def _ulp(run: RunColumns, dtype: str) -> FloatArray:
    assert run.top_logprobs is not None
    assert run.logsumexp is not None
    return unit_in_last_place(run.top_logprobs[:, 0] + run.logsumexp, dtype)
