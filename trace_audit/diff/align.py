"""Puts the rows of two runs side by side, and refuses what is not the same comparison."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trace_audit.config.scoring import RAW, Distribution
from trace_audit.diff.columns import FloatArray, IntArray, RunColumns, integers, run_columns
from trace_audit.diff.trace_index import TraceIndex
from trace_audit.errors import InvalidComparisonError

_MISSING = -1


@dataclass(frozen=True, kw_only=True)
class RunRows:
    """A run's rows, located in the trace.

    Attributes:
        name: The run's name.
        row_of: int64 [M], row of each trace token, -1 where the run has none.
        columns: The run's statistics in its own row order.
        logit_dtype: dtype of the logits ("float32", "bfloat16", "float16"), where known.
        subset: Sequence ids of a run restricted on purpose; None if it is whole.
        distribution: What its logprobs are of, where known.
    """

    name: str
    row_of: IntArray
    columns: RunColumns
    logit_dtype: str | None = None
    subset: tuple[str, ...] | None = None
    distribution: Distribution | None = None


@dataclass(frozen=True, kw_only=True)
class AlignedPair:
    """Scored tokens of two runs, row for row; N tokens in (sequence, step) order.

    Attributes:
        trace: The trace that both scored.
        flat: int64 [N], index of each row into the trace.
        baseline: The baseline's statistics, all [N, ...].
        candidate: The candidate's statistics, all [N, ...].
        record: The record run's statistics: the support was drawn from it.
        unscored: Tokens of the compared sequences that the score mask leaves out.
    """

    trace: TraceIndex
    flat: IntArray
    baseline_name: str
    candidate_name: str
    baseline: RunColumns
    candidate: RunColumns
    record: RunColumns | None
    baseline_logit_dtype: str | None
    candidate_logit_dtype: str | None
    unscored: int
    distribution: Distribution = RAW

    def __len__(self) -> int:
        """Rows, N."""
        return len(self.flat)

    @cached_property
    def delta(self) -> FloatArray:
        """Candidate minus baseline logprob, nats; non-finite where a side is."""
        with np.errstate(invalid="ignore"):  # -inf on both sides
            return self.candidate.logprob - self.baseline.logprob

    @cached_property
    def finite(self) -> NDArray[np.bool_]:
        """Rows that enter averages: bool [N]."""
        return np.isfinite(self.delta)

    @cached_property
    def group(self) -> IntArray:
        """Dense group index of each row: int64 [N]."""
        return np.unique(self.trace.group[self.flat], return_inverse=True)[1].astype(np.int64)

    @cached_property
    def group_ids(self) -> tuple[str, ...]:
        """Group ids by dense index."""
        present = np.unique(self.trace.group[self.flat])
        return tuple(self.trace.group_ids[i] for i in present)

    @property
    def sequence(self) -> IntArray:
        """Sequence index of each row: int64 [N]."""
        return self.trace.sequence[self.flat]

    @property
    def step(self) -> IntArray:
        """0-based output index of each row: int64 [N]."""
        return self.trace.step[self.flat]

    @property
    def position(self) -> IntArray:
        """Absolute position of each row: int64 [N]."""
        return self.trace.position[self.flat]

    @property
    def token_id(self) -> IntArray:
        """Forced token of each row: int64 [N]."""
        return self.trace.token_id[self.flat]

    @cached_property
    def support_token_ids(self) -> IntArray:
        """Fixed support of each row: int64 [N, S], -1 where none."""
        return self.trace.support_token_ids[self.flat]

    @cached_property
    def sources(self) -> frozenset[str]:
        """How the compared tokens came about: greedy, sampled, imported."""
        return frozenset(self.trace.sources[i] for i in np.unique(self.sequence))


def run_rows(
    trace: TraceIndex,
    name: str,
    table: pa.Table,
    *,
    logit_dtype: str | None = None,
    subset: Collection[str] | None = None,
) -> RunRows:
    """Locates a run's rows in the trace.

    Args:
        trace: The audit's trace.
        name: The run's name, for messages.
        table: Its tokens.parquet.
        logit_dtype: dtype of its logits, where known.
        subset: Sequence ids it was restricted to; None if it is whole.

    Raises:
        InvalidComparisonError: A row is not of this trace: unknown or renamed sequence, a step
            outside it, another token or position, or the same position twice.
    """
    if table.num_rows == 0:
        raise InvalidComparisonError(f"Run {name!r} has no rows, so there is nothing to compare.")
    flat = _flat_index(trace, name, table)
    _check_ids(trace, name, table, flat)
    counts = np.bincount(flat, minlength=len(trace))
    if counts.max() > 1:
        where = _place(trace, int(np.argmax(counts > 1)))
        raise InvalidComparisonError(f"Run {name!r} has {where} more than once.")
    row_of = np.full(len(trace), _MISSING, dtype=np.int64)
    row_of[flat] = np.arange(len(flat))
    columns = run_columns(table, num_support=trace.support_token_ids.shape[1])
    return RunRows(
        name=name,
        row_of=row_of,
        columns=columns,
        logit_dtype=logit_dtype,
        subset=None if subset is None else tuple(subset),
    )


def align(
    trace: TraceIndex, baseline: RunRows, candidate: RunRows, *, record: RunRows | None = None
) -> AlignedPair:
    """Pairs the scored tokens of two runs.

    Args:
        trace: The audit's trace.
        baseline: The reference side.
        candidate: The side under test.
        record: The run that the support was drawn from; without it there is no KL.

    Raises:
        InvalidComparisonError: No token is common to both, a token that both should have is
            missing, or the baseline is not finite somewhere.
    """
    wanted = _declared(trace, baseline) & _declared(trace, candidate)
    flat = np.flatnonzero(wanted & trace.scored)
    if not len(flat):
        raise InvalidComparisonError(
            f"Runs {baseline.name!r} and {candidate.name!r} have no scored token in common.",
            hint="Replay the same sequences in both (see --only).",
        )
    for run in (baseline, candidate):
        _check_complete(trace, run, flat)
    pair = AlignedPair(
        trace=trace,
        flat=flat,
        baseline_name=baseline.name,
        candidate_name=candidate.name,
        baseline=baseline.columns.take(baseline.row_of[flat]),
        candidate=candidate.columns.take(candidate.row_of[flat]),
        record=_record_columns(record, flat),
        baseline_logit_dtype=baseline.logit_dtype,
        candidate_logit_dtype=candidate.logit_dtype,
        unscored=int((wanted & ~trace.scored).sum()),
        distribution=baseline.distribution or RAW,
    )
    _check_baseline_finite(pair)
    return pair


def _flat_index(trace: TraceIndex, name: str, table: pa.Table) -> IntArray:
    sequence = integers(table, "sequence_index")
    step = integers(table, "step")
    known = (sequence >= 0) & (sequence < len(trace.sequence_ids))
    inside = known.copy()
    lengths = np.diff(trace.start)
    inside[known] = (step[known] >= 0) & (step[known] < lengths[sequence[known]])
    if not inside.all():
        row = int(np.argmin(inside))
        raise InvalidComparisonError(
            f"Run {name!r} has a row for sequence index {sequence[row]}, step {step[row]}, "
            "which is outside the trace.",
            hint="The run belongs to another trace; replay it on this audit.",
        )
    return trace.start[sequence] + step


def _check_ids(trace: TraceIndex, name: str, table: pa.Table, flat: IntArray) -> None:
    indices = integers(table, "sequence_index")
    firsts = np.unique(indices, return_index=True)[1]
    for index, found in zip(indices[firsts], table["sequence_id"].take(firsts), strict=True):
        expected = trace.sequence_ids[index]
        if found.as_py() != expected:
            raise InvalidComparisonError(
                f"Run {name!r} calls sequence {index} {found.as_py()!r}, the trace calls it "
                f"{expected!r}."
            )
    tokens = integers(table, "token_id")
    different = tokens != trace.token_id[flat]
    if different.any():
        row = int(np.argmax(different))
        raise InvalidComparisonError(
            f"Run {name!r} scored other tokens than the trace: {_place(trace, int(flat[row]))} is "
            f"token {tokens[row]} there and token {trace.token_id[flat[row]]} in the trace "
            f"({int(different.sum())} of {len(tokens)} rows differ).",
            hint=_shift_hint(trace, tokens, flat),
        )
    moved = integers(table, "position") != trace.position[flat]
    if moved.any():
        row = int(np.argmax(moved))
        raise InvalidComparisonError(
            f"Run {name!r} has {_place(trace, int(flat[row]))} at absolute position "
            f"{integers(table, 'position')[row]} instead of {trace.position[flat[row]]}.",
            hint="The prompts differ in length: look for a dropped or doubled BOS token.",
        )


def _shift_hint(trace: TraceIndex, tokens: IntArray, flat: IntArray) -> str:
    for shift in (-1, 1):
        moved = np.clip(flat + shift, 0, len(trace) - 1)
        same_sequence = trace.sequence[moved] == trace.sequence[flat]
        if (tokens == trace.token_id[moved])[same_sequence & (moved != flat)].mean() > 0.9:
            return "The tokens are the trace's, shifted by one step."
    return "Scores of different tokens cannot be compared; replay the run on this audit."


def _declared(trace: TraceIndex, run: RunRows) -> NDArray[np.bool_]:
    if run.subset is None:
        return np.ones(len(trace), dtype=np.bool_)
    chosen = np.isin(np.array(trace.sequence_ids), np.array(run.subset))
    return chosen[trace.sequence]


def _check_complete(trace: TraceIndex, run: RunRows, flat: IntArray) -> None:
    missing = run.row_of[flat] == _MISSING
    if missing.any():
        where = _place(trace, int(flat[np.argmax(missing)]))
        raise InvalidComparisonError(
            f"Run {run.name!r} lacks {int(missing.sum())} of {len(flat)} scored tokens, "
            f"the first of them {where}.",
            hint="A run that is a subset on purpose must say so; replay it with --only.",
        )


def _record_columns(record: RunRows | None, flat: IntArray) -> RunColumns | None:
    if record is None:
        return None
    rows = record.row_of[flat]
    return record.columns.take(rows) if (rows != _MISSING).all() else None


def _check_baseline_finite(pair: AlignedPair) -> None:
    bad = ~np.isfinite(pair.baseline.logprob)
    if pair.distribution.is_filtered:
        bad &= ~np.isneginf(pair.baseline.logprob)
    if bad.any():
        row = int(np.argmax(bad))
        raise InvalidComparisonError(
            f"Baseline {pair.baseline_name!r} has {int(bad.sum())} non-finite logprobs, the first "
            f"({pair.baseline.logprob[row]}) at {_place(pair.trace, int(pair.flat[row]))}.",
            hint="Choose another --baseline.",
        )


def _place(trace: TraceIndex, flat: int) -> str:
    sequence = trace.sequence_ids[trace.sequence[flat]]
    return f"sequence {sequence!r}, step {trace.step[flat]}"
