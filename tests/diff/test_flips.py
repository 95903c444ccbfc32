from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from tests.diff.synthetic import Logits, index_of, model_audit, run_rows
from trace_audit.diff.align import AlignedPair, align
from trace_audit.diff.batches import aligned_batches
from trace_audit.diff.flips import TopChanges, top_changes
from trace_audit.diff.top_tokens import logprob_at, unit_in_last_place

VOCABULARY = 40


def pair_of(record: Logits, candidate: Logits, dtype: str | None = "float32") -> AlignedPair:
    audit = model_audit({"record": record, "b": candidate}, length=len(record))
    trace = index_of(audit.sequences)
    runs = [run_rows(trace, n, audit.tables[n], logit_dtype=dtype) for n in ("record", "b")]
    return align(trace, *runs, record=runs[0])


def changes_of(record: Logits, candidate: Logits, dtype: str | None = "float32") -> TopChanges:
    changes = top_changes(pair_of(record, candidate, dtype))
    assert changes is not None
    return changes


def logits(**best: float) -> Logits:
    """One row of low, distinct logits with a few high ones: t7=2.0 is token 7."""
    row = np.linspace(-4, -3, VOCABULARY)
    for name, value in best.items():
        row[int(name[1:])] = value
    return row[None, :]


def test_a_flip_needs_a_strict_change_on_both_sides() -> None:
    changes = changes_of(logits(t3=2.0, t7=1.5), logits(t3=1.5, t7=2.0))
    assert changes.flip.tolist() == [True]
    assert changes.tie_change.tolist() == [False]
    assert changes.gap[0] == pytest.approx(0.5, abs=1e-6)
    assert changes.candidate_gap[0] == pytest.approx(-0.5, abs=1e-6)


def test_a_change_into_or_out_of_a_tie_is_a_tie_change() -> None:
    tied, lower, higher = logits(t3=2.0, t7=2.0), logits(t3=1.5, t7=2.0), logits(t3=2.0, t7=1.5)
    # Of equal logits the lowest id is best, so 3 leads every tie.
    out_of = changes_of(tied, lower)
    into = changes_of(lower, tied)
    none = changes_of(tied, higher)
    assert (out_of.flip[0], out_of.tie_change[0]) == (False, True)
    assert (into.flip[0], into.tie_change[0]) == (False, True)
    assert (none.flip[0], none.tie_change[0]) == (False, False)


def test_the_same_best_token_is_no_change() -> None:
    changes = changes_of(logits(t3=2.0, t7=1.5), logits(t3=9.0, t7=1.5))
    assert not changes.flip.any()
    assert not changes.tie_change.any()


def test_a_best_token_far_down_on_the_other_side_is_a_flip() -> None:
    # Token 39 is not among the record run's best five; token 0 falls out of the candidate's.
    record = np.linspace(2, -2, VOCABULARY)[None, :]
    candidate = record.copy()
    candidate[0, 39] = 5.0
    candidate[0, 0] = -9.0
    changes = changes_of(record, candidate)
    assert changes.flip.tolist() == [True]
    assert changes.candidate_gap[0] == pytest.approx(-9.0 - record[0, 1], abs=1e-5)


@pytest.mark.parametrize(
    ("logit", "dtype", "spacing"),
    [
        (20.0, "float32", 2.0**-19),
        (20.0, "bfloat16", 2.0**-3),
        (16.0, "bfloat16", 2.0**-3),
        (15.9, "bfloat16", 2.0**-4),
        (-20.0, "float16", 2.0**-6),
    ],
)
def test_unit_in_last_place(logit: float, dtype: str, spacing: float) -> None:
    assert unit_in_last_place(np.array([logit]), dtype)[0] == spacing


def test_unit_in_last_place_agrees_with_numpy() -> None:
    values = np.random.default_rng(0).normal(0, 30, 100)
    np.testing.assert_array_equal(
        unit_in_last_place(values, "float32"), np.spacing(np.abs(values.astype(np.float32)))
    )


def noisy(sigma: float, rows: int = 400) -> tuple[Logits, Logits]:
    generator = np.random.default_rng(3)
    record = generator.normal(0, 2, (rows, VOCABULARY))
    return record, record + generator.normal(0, sigma, record.shape)


def test_scale_threshold_hard_and_expected_follow_the_formulas() -> None:
    record, candidate = noisy(0.1)
    changes = changes_of(record, candidate)
    assert changes.ulp is not None
    assert changes.scale is not None
    assert changes.threshold is not None
    change = np.abs(changes.candidate_gap - changes.gap)
    s = 1.4826 * np.median(change)
    np.testing.assert_allclose(changes.scale, s)
    np.testing.assert_allclose(changes.threshold, 3 * s)
    assert changes.hard is not None
    np.testing.assert_array_equal(changes.hard, changes.flip & (changes.gap > 3 * s))
    # float32 logits are so fine that the rounding term is the plain normal tail.
    assert changes.expected is not None
    tail = stats.norm.cdf(-changes.gap / s)
    np.testing.assert_allclose(changes.expected, tail, rtol=1e-3, atol=1e-9)


def test_expected_flips_of_rounded_logits_by_hand() -> None:
    # sigma = u: x ~ N(gap, 1), E[min(1, max(0, -x))] = H(-gap) - H(-gap - 1), H(m) = m Phi + phi.
    def mean_positive(m: float) -> float:
        return float(m * stats.norm.cdf(m) + stats.norm.pdf(m))

    changes = TopChanges(
        known=np.ones(3, dtype=bool),
        flip=np.zeros(3, dtype=bool),
        tie_change=np.zeros(3, dtype=bool),
        gap=np.array([0.0, 1.0, 2.0]),
        candidate_gap=np.array([0.0, 1.0, 2.0]) + np.sqrt(1 + 1 / 6) / 1.4826,
        baseline_ulp=np.full(3, 1e-6),
        candidate_ulp=np.ones(3),
    )
    assert changes.expected is not None
    expected = [0.0, *(mean_positive(-gap) - mean_positive(-gap - 1) for gap in (1.0, 2.0))]
    np.testing.assert_allclose(changes.expected, expected, rtol=1e-9)
    assert expected[1] == pytest.approx(0.0748, abs=1e-4)


def bfloat16(logits: Logits) -> Logits:
    """Rounded to nearest, ties to even."""
    bits = logits.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


def rounded_pair(sigma: float, offset: float = 20.0) -> TopChanges:
    """A float32 record and a candidate with noise whose logits are then rounded to bfloat16."""
    generator = np.random.default_rng(0)
    record = generator.normal(0, 2, (8000, VOCABULARY)) + offset
    candidate = bfloat16(record + generator.normal(0, sigma, record.shape))
    audit = model_audit({"record": record, "b": candidate}, length=len(record))
    trace = index_of(audit.sequences)
    runs = [
        run_rows(trace, name, audit.tables[name], logit_dtype=dtype)
        for name, dtype in (("record", "float32"), ("b", "bfloat16"))
    ]
    changes = top_changes(align(trace, *runs, record=runs[0]))
    assert changes is not None
    return changes


def test_rounding_alone_makes_ties_and_no_flips() -> None:
    changes = rounded_pair(0.0)
    assert changes.flip.sum() == 0
    assert changes.tie_change.sum() > 100
    assert changes.expected is not None
    assert changes.expected.sum() < 0.04 * changes.tie_change.sum()


@pytest.mark.parametrize("sigma", [0.05, 0.1, 0.2])
def test_a_healthy_rounded_candidate_has_about_the_expected_flips(sigma: float) -> None:
    # Third-best tokens, which the formula leaves out, add to the flips as the noise grows.
    changes = rounded_pair(sigma)
    assert changes.expected is not None
    expected = changes.expected.sum()
    assert expected > 50
    error = 3 * np.sqrt(expected) / expected
    assert 0.9 - error < changes.flip.sum() / expected < 1.2 + error


def test_two_coarse_runs_have_no_expectation() -> None:
    record = bfloat16(np.random.default_rng(1).normal(20, 2, (400, VOCABULARY)))
    candidate = bfloat16(record + np.random.default_rng(2).normal(0, 0.1, record.shape))
    changes = changes_of(record, candidate, "bfloat16")
    assert changes.expected is None
    assert "steps" in str(changes.why_no_expected)
    assert changes.hard is not None


def test_gaussian_noise_gives_about_the_expected_flips_and_no_hard_ones() -> None:
    record, candidate = noisy(0.1, rows=4000)
    changes = changes_of(record, candidate)
    assert changes.expected is not None
    assert changes.hard is not None
    expected = changes.expected.sum()
    assert changes.flip.sum() == pytest.approx(expected, abs=4 * np.sqrt(expected))
    assert changes.hard.sum() <= 3


def test_a_sparse_fault_shows_as_hard_flips() -> None:
    record, candidate = noisy(0.01)
    wide = int(np.argmax(changes_of(record, candidate).gap))
    candidate[wide] = np.roll(candidate[wide], 1)
    changes = changes_of(record, candidate)
    assert changes.hard is not None
    assert np.flatnonzero(changes.hard).tolist() == [wide]


def test_the_coarser_logit_dtype_sets_the_unit() -> None:
    record, candidate = noisy(1e-4)
    audit = model_audit({"record": record, "b": candidate}, length=len(record))
    trace = index_of(audit.sequences)
    runs = [
        run_rows(trace, name, audit.tables[name], logit_dtype=dtype)
        for name, dtype in (("record", "float32"), ("b", "bfloat16"))
    ]
    changes = top_changes(align(trace, *runs))
    assert changes is not None
    assert changes.ulp is not None
    assert changes.threshold is not None
    np.testing.assert_allclose(changes.threshold, 2 * changes.ulp)
    assert changes.ulp.min() > 1e-4


def test_without_a_logit_dtype_hard_flips_are_unknown() -> None:
    changes = changes_of(*noisy(0.1), dtype=None)
    assert changes.hard is None
    assert changes.expected is None


def test_without_best_tokens_there_is_nothing_to_compare() -> None:
    audit = model_audit({"record": noisy(0.1)[0]}, length=400)
    trace = index_of(audit.sequences)
    record = run_rows(trace, "record", audit.tables["record"])
    bare = replace(record, columns=frozenset())
    assert top_changes(align(trace, record, bare)) is None


def test_logprob_lookup_uses_best_tokens_and_support() -> None:
    record, candidate = noisy(0.1, rows=5)
    (batch,) = aligned_batches(pair_of(record, candidate))
    best = batch.baseline.top_token_ids
    assert best is not None
    support = batch.support_token_ids
    for ids in (best[:, 0], support[:, 15], support[:, 21]):
        found = logprob_at(ids, batch.candidate, support)
        truth = candidate[np.arange(5), ids] - np.log(np.exp(candidate).sum(axis=1))
        np.testing.assert_allclose(found, truth, atol=1e-5)
    assert np.isnan(logprob_at(np.full(5, -1, dtype=np.int32), batch.candidate, support)).all()
