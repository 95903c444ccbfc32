"""Two runs side by side, reduced to what their comparison needs of each token.

One pass over both runs. Per token only scalars stay (`docs/architecture.md`, "What a report holds
in memory"); whatever is an average is gathered batch by batch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from trace_audit.diff.batches import AlignedBatch, aligned_batches
from trace_audit.diff.columns import FloatArray, IntArray
from trace_audit.diff.constants import Constant, ConstantCollector
from trace_audit.diff.differences import DifferenceCollector, RowDifferences
from trace_audit.diff.distribution_means import DistributionMeans
from trace_audit.diff.kl_totals import KLCollector, PairKL
from trace_audit.diff.label_means import LabelMeans
from trace_audit.diff.pair_rows import PairRows, pair_rows
from trace_audit.diff.read_ahead import each_in_turn
from trace_audit.diff.router_totals import RouterCollector, RouterTotals
from trace_audit.diff.row_sample import RowSample, SampleCollector
from trace_audit.diff.run_rows import RunRows
from trace_audit.diff.top_tokens import TopCollector, TopTokens
from trace_audit.diff.trace_index import TraceIndex

_Number = TypeVar("_Number", bound=np.number)

_SPREAD_ROWS = 4000  # enough to see what all of them have in common


@dataclass(frozen=True, kw_only=True)
class AlignedPair(PairRows):
    """The compared rows of two runs with what is kept of each; N rows.

    Attributes:
        baseline_stored: Logprobs of the baseline as they are stored: float32 [N].
        candidate_stored: Those of the candidate.
        unequal: bool [N], rows whose logits differ in some bit; None where a run has a row
            without a hash.
        tops: Best tokens of both; None where a run does not have its own.
        kl: Sums of KL in both directions, where they can be had.
        means: Sums of what is only averaged.
        labels: Mean |delta| by kind of token.
        router: Choices of experts; why they cannot be compared, or None where neither model has
            routers.
        differences: Which stored columns differ; None where nobody asked.
        constants: Columns that have one value at every row.
        spread: Some rows, evenly spaced.
        exact: The rows where the exact KL is known; None where nobody asked.
    """

    baseline_stored: NDArray[np.float32]
    candidate_stored: NDArray[np.float32]
    unequal: NDArray[np.bool_] | None
    tops: TopTokens | None
    kl: PairKL
    means: DistributionMeans
    labels: LabelMeans
    router: RouterTotals | str | None
    differences: RowDifferences | None
    constants: tuple[Constant, ...]
    spread: RowSample
    exact: RowSample | None

    @property
    def baseline_logprob(self) -> FloatArray:
        """Logprob of each forced token in the baseline, nats: float64 [N]."""
        return self.baseline_stored.astype(np.float64)

    @property
    def candidate_logprob(self) -> FloatArray:
        """Logprob of each forced token in the candidate, nats: float64 [N]."""
        return self.candidate_stored.astype(np.float64)

    @cached_property
    def delta(self) -> FloatArray:
        """Candidate minus baseline logprob, nats; non-finite where a side is."""
        with np.errstate(invalid="ignore"):  # -inf on both sides
            return np.subtract(self.candidate_stored, self.baseline_stored, dtype=np.float64)

    @cached_property
    def finite(self) -> NDArray[np.bool_]:
        """Rows that enter averages: bool [N]."""
        return np.isfinite(self.delta)

    @property
    def lost(self) -> NDArray[np.bool_]:
        """Rows that the baseline gives a finite logprob and the candidate does not: bool [N]."""
        return ~self.finite & np.isfinite(self.baseline_stored)

    def finite_values(self, values: NDArray[_Number]) -> NDArray[_Number]:
        """Of values [N] those of the finite rows; the array itself where all are."""
        return values if self.finite.all() else values[self.finite]


def align(
    trace: TraceIndex,
    baseline: RunRows,
    candidate: RunRows,
    *,
    record: RunRows | None = None,
    referee: RunRows | None = None,
) -> AlignedPair:
    """Pairs the scored tokens of two runs and reads them; see :func:`pair_rows`."""
    return reduced(pair_rows(trace, baseline, candidate, record=record, referee=referee))


def reduced(
    rows: PairRows, *, differences: bool = False, exact_rows: IntArray | None = None
) -> AlignedPair:
    """Reads the rows of both runs once.

    Args:
        rows: Which rows.
        differences: Whether to look for any difference in any stored column.
        exact_rows: Ascending rows of which the distributions are kept; None: of none.
    """
    logprobs = _Logprobs(rows)
    tops, kl = TopCollector(rows), KLCollector(rows)
    means, labels, router = DistributionMeans(rows), LabelMeans(rows), RouterCollector(rows)
    constants, spread = ConstantCollector(), SampleCollector(_evenly_spaced(len(rows)))
    found = DifferenceCollector(rows) if differences else None
    exact = None if exact_rows is None else SampleCollector(exact_rows)
    collectors = (kl, tops, labels, logprobs, means, router, constants, spread, found, exact)
    each_in_turn(aligned_batches(rows), [c.add for c in collectors if c is not None])
    return AlignedPair(
        **{field.name: getattr(rows, field.name) for field in fields(PairRows)},
        baseline_stored=logprobs.baseline,
        candidate_stored=logprobs.candidate,
        unequal=logprobs.unequal,
        tops=tops.result(),
        kl=kl.result(),
        means=means,
        labels=labels,
        router=router.result(),
        differences=None if found is None else found.result(),
        constants=constants.result(),
        spread=spread.result(),
        exact=None if exact is None else exact.result(),
    )


def _evenly_spaced(num_rows: int) -> IntArray:
    return np.arange(0, num_rows, max(1, -(-num_rows // _SPREAD_ROWS)), dtype=np.int64)


class _Logprobs:
    """Logprobs of both sides, and which rows have other logits."""

    def __init__(self, rows: PairRows) -> None:
        self.baseline = np.zeros(len(rows), dtype=np.float32)
        self.candidate = np.zeros(len(rows), dtype=np.float32)
        self.unequal: NDArray[np.bool_] | None = np.zeros(len(rows), dtype=np.bool_)

    def add(self, batch: AlignedBatch) -> None:
        a, b = batch.baseline, batch.candidate
        self.baseline[batch.rows] = a.logprob
        self.candidate[batch.rows] = b.logprob
        hashed = all(run.has_hash is not None and run.has_hash.all() for run in (a, b))
        if not hashed or self.unequal is None:
            self.unequal = None
            return
        assert a.logits_hash is not None
        assert b.logits_hash is not None
        # Logprobs too: equal logits with unequal logprobs would be a fault of the statistics.
        self.unequal[batch.rows] = (a.logits_hash != b.logits_hash) | (a.logprob != b.logprob)
