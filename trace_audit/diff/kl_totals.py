"""KL of a pair, summed up a batch at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trace_audit.diff.batches import AlignedBatch
from trace_audit.diff.columns import FloatArray, IdArray, RunColumns
from trace_audit.diff.kl import FixedSupport, KLTerms, any_in_row, fixed_support, fixed_support_kl
from trace_audit.diff.moments import Moments
from trace_audit.diff.pair_rows import PairRows
from trace_audit.diff.run_rows import RunRows

_SUPPORT = {"support_logprobs", "log_tail_mass"}


class KLTotals:
    """KL(X || Y) over N positions.

    Attributes:
        rows: Positions, N.
        no_support: Positions without a support.
        non_finite: Positions with a support but a NaN on either side.
        infinite: Positions where Y gives zero probability to something that X does not.
        faults: Positions where it is infinite, or no number by the doing of Y.
        estimate: The full estimator over the positions where it is finite, nats.
        lower_bound: Top ids and one tail bucket, over the same positions.
        heavy: Sum of the estimate where X's tail mass is over four times the record run's.
    """

    def __init__(self, num_groups: int) -> None:
        """Of no positions yet."""
        self.rows = self.no_support = self.non_finite = self.infinite = self.faults = 0
        self.estimate = Moments(num_groups)
        self.lower_bound = Moments(num_groups)
        self.heavy = 0.0

    @property
    def usable(self) -> int:
        """Positions that enter a mean."""
        return self.estimate.size

    @property
    def heavy_share(self) -> float | None:
        """Part of the sum on rows where X's tail mass is over four times the record run's."""
        return self.heavy / self.estimate.total if self.estimate.total > 0 else None

    def add(self, terms: KLTerms, group: IdArray, x: FixedSupport) -> None:
        """The next positions.

        Args:
            terms: Of n positions.
            group: int32 [n].
            x: What the distribution that the expectation is over has there.
        """
        usable = terms.usable
        estimate = terms.estimate[usable]
        self.rows += len(usable)
        self.no_support += int(terms.no_support.sum())
        self.non_finite += int(terms.non_finite.sum())
        self.infinite += int(terms.infinite.sum())
        self.estimate.add(estimate, group[usable])
        self.lower_bound.add(terms.lower_bound[usable], group[usable])
        self.heavy += float(estimate[terms.heavy_tail[usable]].sum())
        self.faults += int((terms.infinite | (terms.non_finite & _sound(x))).sum())


class PairedKL:
    """KL from one run to each side, on the positions that have both.

    Attributes:
        near, far: KL(X || baseline) and KL(X || candidate) over the positions that have each.
        near_used, far_used: Their estimates over the positions that have both, nats.
        difference: Far minus near over those.
        newly_infinite: Whether only the candidate's is infinite somewhere.
    """

    def __init__(self, num_groups: int) -> None:
        """Of no positions yet."""
        self.near, self.far = KLTotals(num_groups), KLTotals(num_groups)
        self.near_used, self.far_used = Moments(num_groups), Moments(num_groups)
        self.difference = Moments(num_groups)
        self.newly_infinite = False

    def add(self, near: KLTerms, far: KLTerms, group: IdArray, x: FixedSupport) -> None:
        """The next positions; see :meth:`KLTotals.add`."""
        self.near.add(near, group, x)
        self.far.add(far, group, x)
        used = near.usable & far.usable
        a, b = near.estimate[used], far.estimate[used]
        self.near_used.add(a, group[used])
        self.far_used.add(b, group[used])
        self.difference.add(b - a, group[used])
        self.newly_infinite |= bool(np.any(far.infinite & ~near.infinite))


@dataclass(frozen=True, kw_only=True)
class PairKL:
    """KL of a pair.

    Attributes:
        forward: KL(baseline || candidate); None where it cannot be had.
        reverse: KL(candidate || baseline).
        estimate: The forward estimator at each of N rows, NaN where there is none: float64 [N].
        record: From the record run to both sides; None where it is the baseline, or cannot be had.
        referee: From the referee to both sides; None where there is none, or it cannot be had.
    """

    forward: KLTotals | None = None
    reverse: KLTotals | None = None
    estimate: FloatArray | None = None
    record: PairedKL | None = None
    referee: PairedKL | None = None


class KLCollector:
    """Fills :class:`PairKL`."""

    def __init__(self, rows: PairRows) -> None:
        """Of no rows yet."""
        groups = len(rows.group_ids)
        self._kl = PairKL()
        sides = (rows.baseline_run, rows.candidate_run, rows.record_run)
        if not all(_has_support(run) for run in sides):
            return
        record, referee = rows.record_run, rows.referee_run
        assert record is not None
        self._kl = PairKL(
            forward=KLTotals(groups),
            reverse=KLTotals(groups),
            estimate=np.full(len(rows), np.nan),
            record=PairedKL(groups) if record.name != rows.baseline_name else None,
            referee=PairedKL(groups) if _has_support(referee) else None,
        )

    def add(self, batch: AlignedBatch) -> None:
        """The next rows."""
        kl = self._kl
        if kl.forward is None or kl.reverse is None or kl.estimate is None:
            return
        a, b, record = (_support(run) for run in (batch.baseline, batch.candidate, batch.record))
        ids = batch.support_token_ids
        forward = fixed_support_kl(a, b, record, ids)
        kl.estimate[batch.rows] = forward.estimate
        kl.forward.add(forward, batch.group, a)
        kl.reverse.add(fixed_support_kl(b, a, record, ids), batch.group, b)
        for paired, run in ((kl.record, batch.record), (kl.referee, batch.referee)):
            if paired is not None:
                x = _support(run)
                near, far = (fixed_support_kl(x, side, record, ids) for side in (a, b))
                paired.add(near, far, batch.group, x)

    def result(self) -> PairKL:
        """Of all rows."""
        return self._kl


def _has_support(run: RunRows | None) -> bool:
    return run is not None and run.columns >= _SUPPORT


def _support(run: RunColumns | None) -> FixedSupport:
    found = fixed_support(run)
    assert found is not None
    return found


def _sound(x: FixedSupport) -> NDArray[np.bool_]:
    """Positions where the distribution itself has no NaN: bool [N]."""
    return ~(any_in_row(np.isnan(x.logprobs)) | np.isnan(x.log_tail))
