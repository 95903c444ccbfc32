"""Which tokens two runs are compared on: decided, or refused, before their numbers are read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trace_audit.config.scoring import RAW, Distribution
from trace_audit.diff.columns import IdArray, IntArray
from trace_audit.diff.run_rows import RunRows
from trace_audit.diff.trace_index import TraceIndex
from trace_audit.errors import InvalidComparisonError

# Rows that are worked on at once after they were read.
PIECE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class PairRows:
    """Scored tokens of two runs, row for row; N tokens in (sequence, step) order.

    Attributes:
        trace: The trace that both scored.
        wanted: bool [M], the trace's tokens that are compared; None if all are.
        baseline_run: The reference side.
        candidate_run: The side under test.
        record_run: The run that the support was drawn from; None where it lacks a compared token.
        referee_run: A third run, and what is nearer to it is told; None where none was named, or it
            lacks a compared token.
        unscored: Tokens of the compared sequences that the score mask leaves out.
    """

    trace: TraceIndex
    wanted: NDArray[np.bool_] | None
    baseline_run: RunRows
    candidate_run: RunRows
    record_run: RunRows | None
    referee_run: RunRows | None
    unscored: int

    def __len__(self) -> int:
        """Rows, N."""
        return int(self.first_row[-1])

    @property
    def baseline_name(self) -> str:
        """Name of the reference side."""
        return self.baseline_run.name

    @property
    def candidate_name(self) -> str:
        """Name of the side under test."""
        return self.candidate_run.name

    @property
    def distribution(self) -> Distribution:
        """What the logprobs of both sides are of; raw where the baseline does not say."""
        return self.baseline_run.distribution or RAW

    @cached_property
    def sequence(self) -> IdArray:
        """Sequence index of each row: int32 [N]."""
        count = len(self.trace.sequence_ids)
        sequence = np.repeat(np.arange(count, dtype=np.int32), np.diff(self.trace.start))
        return sequence if self.wanted is None else sequence[self.wanted]

    @cached_property
    def step(self) -> IdArray:
        """0-based output index of each row: int32 [N]."""
        lengths = np.diff(self.trace.start).tolist()
        step = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
        return step if self.wanted is None else step[self.wanted]

    def position(self, rows: slice | IntArray) -> IntArray:
        """Absolute positions of some rows: int64, as many."""
        return self.trace.prompt_length[self.sequence[rows]] + self.step[rows]

    def pieces(self) -> list[slice]:
        """All rows, a bounded number at a time: what is computed of each then is as well."""
        return [slice(i, min(i + PIECE, len(self))) for i in range(0, len(self), PIECE)]

    @property
    def token_id(self) -> IdArray:
        """Forced token of each row: int32 [N]."""
        return self.trace.token_id if self.wanted is None else self.trace.token_id[self.wanted]

    @cached_property
    def group(self) -> IdArray:
        """Dense group index of each row: int32 [N]."""
        return self.group_of[self.sequence]

    @cached_property
    def group_of(self) -> IdArray:
        """Dense group index of each sequence, 0 of one without a row: int32 [S]."""
        dense = np.zeros(len(self.trace.group_ids), dtype=np.int32)
        dense[self._present_groups] = np.arange(len(self._present_groups))
        return dense[self.trace.group]

    @cached_property
    def group_ids(self) -> tuple[str, ...]:
        """Group ids by dense index."""
        return tuple(self.trace.group_ids[i] for i in self._present_groups)

    @cached_property
    def sources(self) -> frozenset[str]:
        """How the compared tokens came about: greedy, sampled, imported."""
        return frozenset(self.trace.sources[i] for i in self.sequences)

    @cached_property
    def sequences(self) -> IntArray:
        """Indices of the sequences with a row, ascending."""
        return np.flatnonzero(np.diff(self.first_row))

    @cached_property
    def first_row(self) -> IntArray:
        """The row that each of the trace's S sequences starts at, and N: int64 [S + 1]."""
        if self.wanted is None:
            return self.trace.start
        return np.concatenate([[0], np.cumsum(self.wanted)])[self.trace.start]

    @cached_property
    def _present_groups(self) -> IntArray:
        return np.unique(self.trace.group[self.sequences])


def pair_rows(
    trace: TraceIndex,
    baseline: RunRows,
    candidate: RunRows,
    *,
    record: RunRows | None = None,
    referee: RunRows | None = None,
) -> PairRows:
    """Pairs the scored tokens of two runs.

    Args:
        trace: The audit's trace.
        baseline: The reference side.
        candidate: The side under test.
        record: The run that the support was drawn from; without it there is no KL.
        referee: The run that says which of the two is nearer to it.

    Raises:
        InvalidComparisonError: No token is common to both, a token that both should have is
            missing, or the baseline is not finite somewhere.
    """
    declared = _declared(trace, baseline) & _declared(trace, candidate)
    compared = np.repeat(declared, np.diff(trace.start))
    wanted = compared if trace.scored is None else compared & trace.scored
    count = int(wanted.sum())
    if not count:
        raise InvalidComparisonError(
            f"Runs {baseline.name!r} and {candidate.name!r} have no scored token in common.",
            hint="Replay the same sequences in both (see --only).",
        )
    for run in (baseline, candidate):
        _check_complete(trace, run, wanted, count)
    _check_finite(trace, baseline, wanted)
    whole = [None if run is None or len(run.lacks(wanted)) else run for run in (record, referee)]
    return PairRows(
        trace=trace,
        wanted=None if count == len(trace) else wanted,
        baseline_run=baseline,
        candidate_run=candidate,
        record_run=whole[0],
        referee_run=whole[1],
        unscored=int(compared.sum()) - count,
    )


def _declared(trace: TraceIndex, run: RunRows) -> NDArray[np.bool_]:
    """Sequences that the run says it has: bool [S]."""
    if run.subset is None:
        return np.ones(len(trace.sequence_ids), dtype=np.bool_)
    return np.isin(np.array(trace.sequence_ids), np.array(run.subset))


def _check_complete(trace: TraceIndex, run: RunRows, wanted: NDArray[np.bool_], count: int) -> None:
    missing = run.lacks(wanted)
    if len(missing):
        raise InvalidComparisonError(
            f"Run {run.name!r} lacks {len(missing)} of {count} scored tokens, "
            f"the first of them {trace.place(int(missing[0]))}.",
            hint="A run that is a subset on purpose must say so; replay it with --only.",
        )


def _check_finite(trace: TraceIndex, baseline: RunRows, wanted: NDArray[np.bool_]) -> None:
    bad = np.flatnonzero(wanted[baseline.non_finite])
    if (baseline.distribution or RAW).is_filtered:
        bad = bad[~np.isneginf(baseline.non_finite_logprob[bad])]
    if len(bad):
        first = int(bad[np.argmin(baseline.non_finite[bad])])
        raise InvalidComparisonError(
            f"Baseline {baseline.name!r} has {len(bad)} non-finite logprobs, the first "
            f"({baseline.non_finite_logprob[first]}) at "
            f"{trace.place(int(baseline.non_finite[first]))}.",
            hint="Choose another --baseline.",
        )
