"""KL divergence between two runs' next-token distributions, from a fixed support.

The record run stores, per position, its top-k ids and m ids drawn from its own tail; every run
stores its logprobs there and its tail mass. With x, y the two runs' probabilities, t their tail
masses, R the record run, phi(d) = d + expm1(-d) and r_X(v) = x(v) / p_R(v) * t_R / t_X:

    KL(X || Y) = sum_{v in top-k} x phi(ln x/y) + t_X phi(ln t_X/t_Y)
               + t_X mean_j [ r_X ln(r_X / r_Y) - r_X + r_Y ]

The last bracket equals r_X phi(ln r_X / r_Y). What the form adds to sum x ln(x/y) sums to zero in
expectation, and every term is >= 0, so nothing cancels when the runs are close. The first two
terms alone are a lower bound.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from trace_audit.diff.columns import FloatArray, IdArray, IntArray, RunColumns
from trace_audit.storage.schema import SUPPORT_TOP_K

HEAVY_TAIL_RATIO = 4.0
# Positions whose numbers stay in a core's cache.
_AT_ONCE = 2048


@dataclass(frozen=True, kw_only=True)
class FixedSupport:
    """What a run says at the support: S ids a position, of which the first k are the top.

    Attributes:
        logprobs: float [N, S].
        log_tail: float64 [N], log of the mass outside the top k ids.
    """

    logprobs: NDArray[np.floating]
    log_tail: FloatArray

    def at(self, rows: slice | IntArray) -> FixedSupport:
        """At some of the positions."""
        return FixedSupport(logprobs=self.logprobs[rows], log_tail=self.log_tail[rows])


@dataclass(frozen=True, kw_only=True)
class KLTerms:
    """KL(X || Y) per position, float64 [N] nats.

    Attributes:
        estimate: The full estimator; NaN where there is none, inf where Y misses mass of X.
        lower_bound: Top ids and one tail bucket.
        no_support: bool [N], positions without a support.
        non_finite: bool [N], positions with a support but a NaN on either side.
        heavy_tail: bool [N], X's tail mass is over four times the record run's.
    """

    estimate: FloatArray
    lower_bound: FloatArray
    no_support: NDArray[np.bool_]
    non_finite: NDArray[np.bool_]
    heavy_tail: NDArray[np.bool_]

    @property
    def infinite(self) -> NDArray[np.bool_]:
        """Positions where Y gives zero probability to something that X does not: bool [N]."""
        return np.isposinf(self.estimate)

    @property
    def usable(self) -> NDArray[np.bool_]:
        """Positions that enter a mean: bool [N]."""
        return np.isfinite(self.estimate)


def fixed_support(columns: RunColumns | None) -> FixedSupport | None:
    """The support columns of a run, or None where it does not have them."""
    if columns is None or columns.support_logprobs is None or columns.log_tail_mass is None:
        return None
    return FixedSupport(logprobs=columns.support_logprobs, log_tail=columns.log_tail_mass)


def fixed_support_kl(
    x: FixedSupport,
    y: FixedSupport,
    record: FixedSupport,
    support_token_ids: IdArray,
    *,
    num_top: int = SUPPORT_TOP_K,
) -> KLTerms:
    """KL(X || Y) at every position.

    Args:
        x: The distribution that the expectation is over.
        y: The other one.
        record: The run whose tail the last S - num_top ids were drawn from.
        support_token_ids: int32 [N, S], -1 where none.
        num_top: k, leading ids that are the record run's best; the rest are draws.
    """
    pieces = []
    for start in range(0, max(len(support_token_ids), 1), _AT_ONCE):
        rows = slice(start, start + _AT_ONCE)
        runs = (x.at(rows), y.at(rows), record.at(rows))
        pieces.append(_terms(runs, support_token_ids[rows], num_top))
    names = [field.name for field in fields(KLTerms)]
    return KLTerms(**{n: np.concatenate([getattr(piece, n) for piece in pieces]) for n in names})


def _terms(
    runs: tuple[FixedSupport, FixedSupport, FixedSupport], support_token_ids: IdArray, num_top: int
) -> KLTerms:
    """KL(X || Y) at some positions from what X, Y and the record run have there."""
    x, y, record = runs
    draws = support_token_ids.shape[1] - num_top
    no_support = any_in_row(support_token_ids < 0) | (draws <= 0)
    top_x, top_y = (_float64(run.logprobs[:, :num_top]) for run in (x, y))
    # A draw is a row here: numpy is slow on rows of a few numbers.
    drawn_x, drawn_y, drawn_record = (
        FixedSupport(logprobs=_float64(run.logprobs[:, num_top:].T), log_tail=run.log_tail)
        for run in runs
    )
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        lower_bound = _phi_terms(top_x, top_y).sum(axis=1) + _phi_terms(x.log_tail, y.log_tail)
        tail = _tail_terms(drawn_x, drawn_y, drawn_record)
        estimate = lower_bound + tail.sum(axis=0) / max(draws, 1)
        heavy = x.log_tail > record.log_tail + np.log(HEAVY_TAIL_RATIO)
    non_finite = ~no_support & np.isnan(estimate)
    return KLTerms(
        estimate=np.where(no_support, np.nan, estimate),
        lower_bound=np.where(no_support | non_finite, np.nan, lower_bound),
        no_support=no_support,
        non_finite=non_finite,
        heavy_tail=heavy & ~no_support,
    )


def _float64(values: NDArray[np.floating]) -> FloatArray:
    return np.ascontiguousarray(values, dtype=np.float64)


def any_in_row(marked: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Rows of [N, S] with a mark, of which most batches have none: bool [N]."""
    rows = np.zeros(len(marked), dtype=np.bool_)
    if marked.any():
        np.any(marked, axis=1, out=rows)
    return rows


def _phi(d: FloatArray) -> FloatArray:
    phi = np.negative(d)
    np.expm1(phi, out=phi)
    phi += d
    return phi


def _phi_terms(log_x: FloatArray, log_y: FloatArray) -> FloatArray:
    """x ln(x/y) - x + y: y where x is zero, inf where only y is zero, 0 where both are."""
    terms = _phi(log_x - log_y)
    terms *= np.exp(log_x)
    return _at_zeros(terms, log_x, log_y, log_y)


def _tail_terms(x: FixedSupport, y: FixedSupport, record: FixedSupport) -> FloatArray:
    """t_X r_X phi(ln r_X/r_Y) of each draw: [m, N]."""
    log_weight_x = x.logprobs - record.logprobs + record.log_tail
    # t_X r_Y: what is left of a term when x(v) is zero.
    log_weight_y = y.logprobs - record.logprobs + record.log_tail + x.log_tail - y.log_tail
    terms = np.exp(log_weight_x) * _phi(log_weight_x - log_weight_y)
    return _at_zeros(terms, x.logprobs, y.logprobs, log_weight_y)


def _at_zeros(
    terms: FloatArray,
    log_x: NDArray[np.floating],
    log_y: NDArray[np.floating],
    log_left: FloatArray,
) -> FloatArray:
    """The terms, with their limits where a probability is zero; ``log_left`` is left of x = 0."""
    zero_x, zero_y = log_x == -np.inf, log_y == -np.inf
    if not (zero_x.any() or zero_y.any()):
        return terms
    terms = np.where(zero_x, np.exp(log_left), terms)
    return np.where(zero_y & ~np.isnan(log_x), np.where(zero_x, 0.0, np.inf), terms)
