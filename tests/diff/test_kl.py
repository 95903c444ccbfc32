from __future__ import annotations

import math

import numpy as np
import pytest

from tests.diff.synthetic import Logits, draw_support, log_softmax, logsumexp
from trace_audit.diff.kl import FixedSupport, fixed_support_kl

NUM_TOP = 20


def support_of(logits: Logits, ids: np.ndarray, num_top: int = NUM_TOP) -> FixedSupport:
    logprobs = log_softmax(logits)
    tail = logprobs.copy()
    np.put_along_axis(tail, ids[:, :num_top], -np.inf, axis=1)
    return FixedSupport(
        logprobs=np.take_along_axis(logprobs, ids, axis=1), log_tail=logsumexp(tail)
    )


def exact_kl(x: Logits, y: Logits) -> Logits:
    lx, ly = log_softmax(x), log_softmax(y)
    result: Logits = (np.exp(lx) * (lx - ly)).sum(axis=1)
    return result


def test_hand_computed_example() -> None:
    # Four tokens, the best one in the top set, draws 2 and 1 from the record run's tail.
    x = np.log([[0.5, 0.3, 0.15, 0.05]])
    y = np.log([[0.4, 0.3, 0.2, 0.1]])
    ids = np.array([[0, 2, 1]])
    a, b = support_of(x, ids, 1), support_of(y, ids, 1)
    terms = fixed_support_kl(a, b, a, ids, num_top=1)
    top = 0.5 * math.log(0.5 / 0.4) - 0.5 + 0.4
    bucket = 0.5 * math.log(0.5 / 0.6) - 0.5 + 0.6
    r_y = [0.2 / 0.15 * 0.5 / 0.6, 0.3 / 0.3 * 0.5 / 0.6]
    draws = 0.5 * sum(-math.log(r) - 1 + r for r in r_y) / 2
    assert terms.lower_bound[0] == pytest.approx(top + bucket, rel=1e-12)
    assert terms.estimate[0] == pytest.approx(top + bucket + draws, rel=1e-12)
    assert terms.estimate[0] == pytest.approx(0.0257624, rel=1e-5)


def test_expectation_over_single_draws_is_the_exact_kl() -> None:
    generator = np.random.default_rng(0)
    record, x, y = generator.normal(0, 2, (3, 1, 200))
    top = np.argsort(-record, axis=1)[:, :NUM_TOP]
    tail_ids = np.setdiff1d(np.arange(200), top)
    weight = np.exp(log_softmax(record))[0, tail_ids]
    rows = len(tail_ids)
    ids = np.concatenate([np.repeat(top, rows, axis=0), tail_ids[:, None]], axis=1)
    a, b, r = (support_of(np.repeat(run, rows, axis=0), ids) for run in (x, y, record))
    estimate = fixed_support_kl(a, b, r, ids).estimate
    mean = float(estimate @ weight / weight.sum())
    assert mean == pytest.approx(float(exact_kl(x, y)[0]), rel=1e-10)


@pytest.mark.parametrize("fault", ["rounding", "coarse", "sparse"])
def test_average_over_tail_draws_is_the_exact_kl(fault: str) -> None:
    # The paired difference against exact KL has a standard error of well under 6 %, the size of
    # the bias that the plain form had.
    generator = np.random.default_rng(11)
    positions, vocabulary = 2000, 400
    record = generator.normal(0, 2.0, (positions, vocabulary))
    candidate = record + generator.normal(0, 0.3 if fault == "coarse" else 0.02, record.shape)
    if fault == "sparse":
        broken = generator.random(positions) < 0.1
        candidate[broken] += generator.normal(0, 1.0, (int(broken.sum()), vocabulary))
    baseline = record + generator.normal(0, 0.01, record.shape)
    ids = draw_support(record, generator, draws=64)
    a, b, r = (support_of(run, ids) for run in (baseline, candidate, record))
    exact = exact_kl(baseline, candidate)
    difference = fixed_support_kl(a, b, r, ids).estimate - exact
    error = difference.std(ddof=1) / math.sqrt(positions)
    assert abs(difference.mean()) < 4 * error
    assert error < 0.01 * exact.mean()


def test_terms_are_never_negative_and_bounds_order() -> None:
    generator = np.random.default_rng(2)
    record = generator.normal(0, 3, (500, 100))
    near = record + generator.normal(0, 1e-6, record.shape)
    ids = draw_support(record, generator)
    a = support_of(record.astype(np.float32).astype(np.float64), ids)
    b = support_of(near.astype(np.float32).astype(np.float64), ids)
    terms = fixed_support_kl(a, b, a, ids)
    assert (terms.lower_bound >= 0).all()
    assert (terms.estimate >= terms.lower_bound).all()
    # Close runs: nothing cancels, so the estimate stays of the size of the exact value.
    exact = exact_kl(record, near).mean()
    assert terms.estimate.mean() == pytest.approx(exact, rel=0.5)


def test_equal_runs_have_exactly_zero() -> None:
    record = np.random.default_rng(4).normal(size=(10, 50))
    ids = draw_support(record, np.random.default_rng(5))
    side = support_of(record, ids)
    terms = fixed_support_kl(side, side, side, ids)
    assert (terms.estimate == 0).all()


def changed(side: FixedSupport, column: int, value: float) -> FixedSupport:
    logprobs = side.logprobs.copy()
    logprobs[:, column] = value
    return FixedSupport(logprobs=logprobs, log_tail=side.log_tail)


@pytest.mark.parametrize("column", [3, NUM_TOP + 1])
def test_minus_infinity_rules(column: int) -> None:
    record = np.random.default_rng(6).normal(size=(3, 50))
    ids = draw_support(record, np.random.default_rng(7))
    side = support_of(record, ids)
    other = support_of(record + 0.1 * np.sin(np.arange(50.0)), ids)
    gone, other_gone = changed(side, column, -np.inf), changed(other, column, -np.inf)
    # On both sides: skipped, not 0 * nan.
    both = fixed_support_kl(gone, other_gone, side, ids)
    assert both.usable.all()
    # On Y's side only: infinite and counted.
    one = fixed_support_kl(side, other_gone, side, ids)
    assert one.infinite.all()
    assert not one.usable.any()
    # On X's side only: the limit, finite.
    assert fixed_support_kl(gone, other, side, ids).usable.all()


def test_nan_is_counted_and_left_out() -> None:
    record = np.random.default_rng(8).normal(size=(4, 50))
    ids = draw_support(record, np.random.default_rng(9))
    side = support_of(record, ids)
    logprobs = side.logprobs.copy()
    logprobs[1, 0] = np.nan
    terms = fixed_support_kl(
        side, FixedSupport(logprobs=logprobs, log_tail=side.log_tail), side, ids
    )
    assert terms.non_finite.tolist() == [False, True, False, False]
    assert terms.usable.tolist() == [True, False, True, True]


def test_positions_without_a_support_are_left_out() -> None:
    record = np.random.default_rng(10).normal(size=(2, 50))
    ids = draw_support(record, np.random.default_rng(11))
    ids[0, NUM_TOP:] = -1
    side = support_of(record, np.maximum(ids, 0))
    terms = fixed_support_kl(side, side, side, ids)
    assert terms.no_support.tolist() == [True, False]
    assert terms.usable.tolist() == [False, True]
    assert not terms.non_finite.any()


def test_heavy_tail_marks_positions_where_the_draws_do_not_represent_x() -> None:
    record = np.zeros((1, 50))
    record[0, :NUM_TOP] = 8.0
    flat = np.zeros((1, 50))
    ids = draw_support(record, np.random.default_rng(12))
    side, other = support_of(record, ids), support_of(flat, ids)
    assert fixed_support_kl(other, side, side, ids).heavy_tail.all()
    assert not fixed_support_kl(side, other, side, ids).heavy_tail.any()
