"""Whether one run's logprobs are another's at some temperature.

A run X with logprobs at the fixed support says what it would give the forced token y at any
temperature T = 1 / beta: beta ln x(y) - ln sum_v x(v)^beta, where the sum is over its top ids plus
an estimate of the tail from the draws, t_R mean_j x(v_j)^beta / p_R(v_j) with the record run R.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trace_audit.diff.align import AlignedPair
from trace_audit.diff.columns import FloatArray, IntArray
from trace_audit.diff.kl import FixedSupport
from trace_audit.diff.row_sample import SampledRun
from trace_audit.storage.schema import SUPPORT_TOP_K

_MIN_TOKENS = 16
_MAX_TOKENS = 2000  # evenly spaced ones are enough for one number
_COARSE = np.geomspace(0.2, 5.0, 81)
_FINE = np.geomspace(0.96, 1.04, 17)


@dataclass(frozen=True, kw_only=True)
class TemperatureFit:
    """The temperature that brings one run's logprobs nearest to another's.

    Attributes:
        given: Run whose logprobs are explained.
        own: Run whose distribution is heated or cooled.
        temperature: Of the best fit, within 0.2 to 5.
        explained: Part of the squared deltas that is gone at it; 0: none, 1: all.
    """

    given: str
    own: str
    temperature: float
    explained: float


def fitted_temperature(pair: AlignedPair) -> TemperatureFit | None:
    """The best fit, by a run of the two that has the support; None where none can be made."""
    sample = pair.spread
    sides = [(pair.baseline_name, sample.baseline), (pair.candidate_name, sample.candidate)]
    if sample.baseline.support is None:
        sides.reverse()
    (own_name, own), (given_name, given) = sides
    record = None if sample.record is None else sample.record.support
    support = own.support
    if record is None or support is None:
        return None
    rows = _rows(own, given, record)
    deltas = given.logprob[rows] - own.logprob[rows]
    if len(rows) < _MIN_TOKENS or not deltas.any():
        return None
    beta = 1.0
    for grid in (_COARSE, _FINE):
        rests = [_rest(given, own, support, record, rows, beta * factor) for factor in grid]
        beta *= float(grid[int(np.argmin(rests))])
    explained = 1 - min(rests) / float(deltas @ deltas)
    return TemperatureFit(given=given_name, own=own_name, temperature=1 / beta, explained=explained)


def _rows(own: SampledRun, given: SampledRun, record: FixedSupport) -> IntArray:
    """Rows where everything is known, thinned out: int64 [n]."""
    assert own.support is not None
    known = np.isfinite(own.logprob) & np.isfinite(given.logprob)
    known &= np.isfinite(record.logprobs).all(axis=1) & np.isfinite(record.log_tail)
    known &= ~np.isnan(own.support.logprobs).any(axis=1)
    rows = np.flatnonzero(known)
    return rows[:: max(1, -(-len(rows) // _MAX_TOKENS))]


def _rest(
    given: SampledRun,
    own: SampledRun,
    support: FixedSupport,
    record: FixedSupport,
    rows: IntArray,
    beta: float,
) -> float:
    """Squared deltas that are left at a temperature of 1 / beta, summed over the rows."""
    x, r = support.logprobs[rows], record.logprobs[rows]
    top = np.exp(beta * x[:, :SUPPORT_TOP_K]).sum(axis=1)
    drawn = np.exp(beta * x[:, SUPPORT_TOP_K:] - r[:, SUPPORT_TOP_K:])
    tail = np.exp(record.log_tail[rows]) * drawn.mean(axis=1)
    predicted: FloatArray = beta * own.logprob[rows] - np.log(top + tail)
    rest = given.logprob[rows] - predicted
    return float(rest @ rest)
