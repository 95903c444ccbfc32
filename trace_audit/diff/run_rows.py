"""A run's rows located in the trace, and everything about them that makes a comparison invalid."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trace_audit.config.scoring import Distribution
from trace_audit.diff.columns import FloatArray, IntArray, integers, present_columns
from trace_audit.diff.routing import RunRouting
from trace_audit.diff.trace_index import TraceIndex
from trace_audit.errors import InvalidComparisonError
from trace_audit.storage.schema import OPTIONAL_FIELDS, TOKENS_SCHEMA

_KEYS = ("sequence_index", "sequence_id", "step", "position", "token_id")
STATISTICS = tuple(field.name for field in (*TOKENS_SCHEMA, *OPTIONAL_FIELDS) if field.nullable)
"""Columns that a run may be without."""

# Where a column that a run has shows as a rule.
_FEW_ROWS = 64


class TokenReader(Protocol):
    """Stored rows of a run (``trace_audit.storage.token_file.TokenFile``)."""

    @property
    def num_rows(self) -> int:
        """Rows of the run."""

    @property
    def column_names(self) -> Sequence[str]:
        """Columns of the run, null in every row or not."""

    def slices(self, ranges: Sequence[range], columns: Sequence[str]) -> Iterator[pa.Table]:
        """Rows of ascending ranges, a table each."""

    def pieces(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """All rows, some of them at a time."""


@dataclass(frozen=True, kw_only=True)
class RunRows:
    """Where a run's rows are; M tokens and S sequences in the trace.

    Attributes:
        name: The run's name.
        reader: Gives the rows.
        first_row: int64 [S + 1], the run's row that each sequence starts at.
        packed: A bit for each of the M tokens that the run has; None if it has all.
        in_order: Whether its rows are in the order of the trace's tokens.
        non_finite: Flat indices of the tokens whose logprob is not finite: int64 [B].
        non_finite_logprob: Their logprobs: float64 [B].
        columns: Names of the nullable columns that are not all null.
        logit_dtype: dtype of the logits ("float32", "bfloat16", "float16"), where known.
        subset: Sequence ids of a run restricted on purpose; None if it is whole.
        distribution: What its logprobs are of, where known.
        routing: The routers whose choices it stores, or why it does not; None where its model has
            none.
    """

    name: str
    reader: TokenReader
    first_row: IntArray
    packed: NDArray[np.uint8] | None
    in_order: bool
    non_finite: IntArray
    non_finite_logprob: FloatArray
    columns: frozenset[str]
    logit_dtype: str | None = None
    subset: tuple[str, ...] | None = None
    distribution: Distribution | None = None
    routing: RunRouting | str | None = None

    def lacks(self, wanted: NDArray[np.bool_]) -> IntArray:
        """Flat indices of the wanted tokens (bool [M]) that the run has no row of."""
        if self.packed is None:
            return np.zeros(0, dtype=np.int64)
        has = np.unpackbits(self.packed, count=len(wanted)).view(np.bool_)
        return np.flatnonzero(wanted & ~has)


def run_rows(
    trace: TraceIndex,
    name: str,
    reader: TokenReader,
    *,
    logit_dtype: str | None = None,
    subset: Collection[str] | None = None,
    distribution: Distribution | None = None,
    routing: RunRouting | str | None = None,
) -> RunRows:
    """Locates a run's rows in the trace.

    Args:
        trace: The audit's trace.
        name: The run's name, for messages.
        reader: Its rows, of which keys and logprobs are read.
        logit_dtype: dtype of its logits, where known.
        subset: Sequence ids it was restricted to; None if it is whole.
        distribution: What its logprobs are of, where known.
        routing: See :class:`RunRows`.

    Raises:
        InvalidComparisonError: A row is not of this trace: unknown or renamed sequence, a step
            outside it, another token or position, or the same position twice.
    """
    if reader.num_rows == 0:
        raise InvalidComparisonError(f"Run {name!r} has no rows, so there is nothing to compare.")
    location = _Location(trace, name)
    for table in reader.pieces((*_KEYS, "logprob")):
        location.add(table)
    location.check(reader)
    return RunRows(
        name=name,
        reader=reader,
        first_row=np.concatenate([[0], np.cumsum(location.rows_of)]),
        packed=None if location.has.all() else np.packbits(location.has),
        in_order=location.in_order,
        non_finite=np.concatenate(location.bad_flat),
        non_finite_logprob=np.concatenate(location.bad_logprob),
        columns=_present(reader),
        logit_dtype=logit_dtype,
        subset=None if subset is None else tuple(subset),
        distribution=distribution,
        routing=routing,
    )


class _Location:
    """What the keys of a run's rows say, a piece at a time.

    Faults are kept until all rows were seen: a message counts them, and of several kinds the same
    one is named whatever the pieces are.
    """

    def __init__(self, trace: TraceIndex, name: str) -> None:
        self.has = np.zeros(len(trace), dtype=np.bool_)
        self.rows_of = np.zeros(len(trace.sequence_ids), dtype=np.int64)
        self.bad_flat: list[IntArray] = []
        self.bad_logprob: list[FloatArray] = []
        self.in_order = True
        self._trace = trace
        self._name = name
        self._last_sequence = self._last_flat = -1
        self._renamed: str | None = None
        self._tokens = (0, "")
        self._moved: str | None = None
        self._twice: int | None = None

    def add(self, table: pa.Table) -> None:
        """The next rows."""
        sequence, step = integers(table, "sequence_index"), integers(table, "step")
        flat = flat_index(self._trace, self._name, sequence, step)
        self.rows_of += np.bincount(sequence, minlength=len(self.rows_of))
        self._names(table, sequence)
        self._contents(table, flat, sequence, step)
        self._duplicates(flat)
        logprob = table["logprob"].to_numpy()
        bad = np.flatnonzero(~np.isfinite(logprob))
        self.bad_flat.append(flat[bad])
        self.bad_logprob.append(logprob[bad].astype(np.float64))

    def check(self, reader: TokenReader) -> None:
        """Refuses what was found.

        Raises:
            InvalidComparisonError: Something was.
        """
        if self._renamed is not None:
            raise InvalidComparisonError(self._renamed)
        different, first = self._tokens
        if different:
            raise InvalidComparisonError(
                f"{first} ({different} of {reader.num_rows} rows differ).",
                hint=_shift_hint(self._trace, self._name, reader),
            )
        if self._moved is not None:
            raise InvalidComparisonError(
                self._moved,
                hint="The prompts differ in length: look for a dropped or doubled BOS token.",
            )
        if self._twice is not None:
            where = self._trace.place(self._twice)
            raise InvalidComparisonError(f"Run {self._name!r} has {where} more than once.")

    def _names(self, table: pa.Table, sequence: IntArray) -> None:
        indices, firsts = np.unique(sequence, return_index=True)
        for index, found in zip(indices, table["sequence_id"].take(firsts), strict=True):
            expected = self._trace.sequence_ids[index]
            if index != self._last_sequence and found.as_py() != expected and not self._renamed:
                self._renamed = (
                    f"Run {self._name!r} calls sequence {index} {found.as_py()!r}, the trace calls "
                    f"it {expected!r}."
                )
        self._last_sequence = int(sequence[-1])

    def _contents(
        self, table: pa.Table, flat: IntArray, sequence: IntArray, step: IntArray
    ) -> None:
        trace, name = self._trace, self._name
        tokens = integers(table, "token_id")
        different = np.flatnonzero(tokens != trace.token_id[flat])
        count, first = self._tokens
        if len(different) and not count:
            row = int(different[0])
            first = (
                f"Run {name!r} scored other tokens than the trace: {trace.place(int(flat[row]))} "
                f"is token {tokens[row]} there and token {trace.token_id[flat[row]]} in the trace"
            )
        self._tokens = (count + len(different), first)
        if self._moved is None:
            position = integers(table, "position")
            expected = trace.prompt_length[sequence] + step
            moved = np.flatnonzero(position != expected)
            if len(moved):
                row = int(moved[0])
                self._moved = (
                    f"Run {name!r} has {trace.place(int(flat[row]))} at absolute position "
                    f"{position[row]} instead of {expected[row]}."
                )

    def _duplicates(self, flat: IntArray) -> None:
        again = flat[self.has[flat]]
        rising = bool((np.diff(flat) > 0).all())
        self.in_order &= rising and int(flat[0]) > self._last_flat
        self._last_flat = int(flat[-1])
        if not rising:
            ordered = np.sort(flat)
            again = np.concatenate([again, ordered[1:][np.diff(ordered) == 0]])
        if len(again):
            self._twice = min(
                int(again.min()), len(self._trace) if self._twice is None else self._twice
            )
        self.has[flat] = True


def flat_index(trace: TraceIndex, name: str, sequence: IntArray, step: IntArray) -> IntArray:
    """Index into the trace of rows by sequence and step: int64 [n].

    Raises:
        InvalidComparisonError: A row is outside the trace.
    """
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


def _shift_hint(trace: TraceIndex, name: str, reader: TokenReader) -> str:
    """Says whether the tokens are the trace's at another step; reads the keys once more."""
    same, rows = {-1: 0, 1: 0}, {-1: 0, 1: 0}
    for table in reader.pieces(_KEYS):
        sequence, tokens = integers(table, "sequence_index"), integers(table, "token_id")
        flat = flat_index(trace, name, sequence, integers(table, "step"))
        for shift in same:
            moved = np.clip(flat + shift, 0, len(trace) - 1)
            counted = (trace.sequence_of(moved) == sequence) & (moved != flat)
            rows[shift] += int(counted.sum())
            same[shift] += int((tokens == trace.token_id[moved])[counted].sum())
    if any(rows[shift] and same[shift] / rows[shift] > 0.9 for shift in same):
        return "The tokens are the trace's, shifted by one step."
    return "Scores of different tokens cannot be compared; replay the run on this audit."


def _present(reader: TokenReader) -> frozenset[str]:
    """Nullable columns with a value; each is read until it has one."""
    few = range(min(_FEW_ROWS, reader.num_rows))
    statistics = [name for name in STATISTICS if name in reader.column_names]
    (first,) = reader.slices([few], statistics)
    found = present_columns(first)
    rest = [name for name in statistics if name not in found]
    return found | {
        name for name in rest if any(present_columns(t) for t in reader.pieces((name,)))
    }
