from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

from tests.diff.synthetic import index_of, logprob_pair, make_sequences, run_rows, run_table
from trace_audit.diff.align import AlignedPair, align
from trace_audit.diff.columns import run_columns
from trace_audit.diff.run_rows import RunRows
from trace_audit.errors import InvalidComparisonError
from trace_audit.storage.trace import TraceSequence

TOKENS = np.array([[3, 4, 5], [6, 7, 8]])
LOGPROBS = np.log([0.5, 0.25, 0.125, 0.5, 0.25, 0.125])


def sequences(**options: object) -> list[TraceSequence]:
    return make_sequences(TOKENS, **options)  # type: ignore[arg-type]


def table(**changed: object) -> pa.Table:
    return run_table(sequences(), {"logprob": LOGPROBS}, **changed)


def rows(name: str, data: pa.Table, **options: object) -> RunRows:
    return run_rows(index_of(sequences()), name, data, **options)  # type: ignore[arg-type]


def aligned(a: pa.Table, b: pa.Table) -> AlignedPair:
    return align(index_of(sequences()), rows("record", a), rows("b", b))


def test_rows_are_matched_by_sequence_and_step_not_by_order() -> None:
    shuffled = table().take([4, 0, 5, 2, 1, 3])
    pair = aligned(table(), shuffled)
    assert (pair.delta == 0).all()
    assert pair.position(slice(None)).tolist() == [5, 6, 7, 5, 6, 7]
    assert pair.token_id.tolist() == TOKENS.ravel().tolist()


def test_delta_is_candidate_minus_baseline() -> None:
    # The candidate gives the token probability 0.8 where the baseline gave 0.4: more confident.
    pair = logprob_pair(np.log([0.4]), np.log([0.8]))
    assert pair.delta[0] == pytest.approx(np.log(2), rel=1e-6)


def test_arithmetic_is_float64() -> None:
    assert logprob_pair([-1.0], [-1.5]).delta.dtype == np.float64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.slice(0, 0), "no rows"),
        (lambda t: pa.concat_tables([t, t.slice(2, 1)]), "sequence 's0', step 2 more than once"),
        (lambda t: t.slice(1), "lacks 1 of 6 scored tokens"),
    ],
)
def test_empty_duplicate_and_missing_rows_are_invalid(
    change: Callable[[pa.Table], pa.Table], message: str
) -> None:
    for a, b in ((table(), change(table())), (change(table()), table())):
        with pytest.raises(InvalidComparisonError, match=message) as caught:
            aligned(a, b)
        assert caught.value.exit_code == 4


def test_other_tokens_are_invalid_and_named() -> None:
    wrong = TOKENS.ravel().copy()
    wrong[4] = 99
    with pytest.raises(
        InvalidComparisonError, match="'s1', step 1 is token 99 there and token 7 in the trace"
    ):
        rows("b", table(token_id=wrong))


def test_tokens_shifted_by_one_get_a_hint() -> None:
    shifted = np.array([[99, 3, 4], [99, 6, 7]]).ravel()
    with pytest.raises(InvalidComparisonError) as caught:
        rows("b", table(token_id=shifted))
    assert caught.value.hint is not None
    assert "shifted by one" in caught.value.hint


def test_a_moved_position_is_invalid() -> None:
    with pytest.raises(InvalidComparisonError, match="absolute position 6 instead of 5") as caught:
        rows("b", table(position=np.array([6, 7, 8, 6, 7, 8])))
    assert caught.value.hint is not None
    assert "BOS" in caught.value.hint


def test_rows_outside_the_trace_are_invalid() -> None:
    for changed in ({"step": np.array([0, 1, 3, 0, 1, 2])}, {"sequence_index": np.full(6, 2)}):
        with pytest.raises(InvalidComparisonError, match="outside the trace"):
            rows("b", table(**changed))


def test_a_renamed_sequence_is_invalid() -> None:
    with pytest.raises(InvalidComparisonError, match="calls sequence 1 'other'"):
        rows("b", table(sequence_id=["s0"] * 3 + ["other"] * 3))


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
def test_a_non_finite_baseline_is_invalid(value: float) -> None:
    broken = LOGPROBS.copy()
    broken[3] = value
    with pytest.raises(InvalidComparisonError, match=r"1 non-finite logprobs.*'s1', step 0"):
        aligned(table(logprob=broken), table())


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_non_finite_candidate_is_kept_and_left_out_of_averages(value: float) -> None:
    broken = LOGPROBS.copy()
    broken[3] = value
    pair = aligned(table(), table(logprob=broken))
    assert pair.finite.tolist() == [True] * 3 + [False] + [True] * 2
    np.testing.assert_equal(pair.candidate_logprob[3], value)


def test_masked_tokens_are_not_scored() -> None:
    masked = sequences(masks={0: np.array([True, False, True])})
    trace = index_of(masked)
    full = run_table(masked, {"logprob": LOGPROBS})
    # A run may carry rows for masked tokens or not; neither is compared.
    for candidate in (full, full.take([0, 2, 3, 4, 5])):
        pair = align(trace, run_rows(trace, "a", full), run_rows(trace, "b", candidate))
        assert pair.step.tolist() == [0, 2, 0, 1, 2]
        assert pair.unscored == 1


def test_a_declared_subset_is_compared_on_its_own_sequences() -> None:
    trace = index_of(sequences())
    part = run_rows(trace, "b", table().slice(3), subset=["s1"])
    pair = align(trace, rows("record", table()), part)
    assert pair.trace.sequence_ids[pair.sequence[0]] == "s1"
    assert len(pair) == 3


def test_disjoint_subsets_are_invalid() -> None:
    trace = index_of(sequences())
    first = run_rows(trace, "a", table().slice(0, 3), subset=["s0"])
    second = run_rows(trace, "b", table().slice(3), subset=["s1"])
    with pytest.raises(InvalidComparisonError, match="no scored token in common"):
        align(trace, first, second)


def test_a_trace_of_masked_tokens_only_is_invalid() -> None:
    masked = sequences(masks={i: np.zeros(3, dtype=bool) for i in range(2)})
    trace = index_of(masked)
    run = run_rows(trace, "a", run_table(masked, {"logprob": LOGPROBS}))
    with pytest.raises(InvalidComparisonError, match="no scored token in common"):
        align(trace, run, run)


def test_null_and_absent_columns_are_told_apart() -> None:
    ranks = pa.array([1, None, 2, 1, 1, 1], pa.int32())
    run = run_columns(table(rank=ranks), num_support=24)
    assert run.rank is not None
    assert np.isnan(run.rank[1])
    assert run.tie_count is None
    assert run.top_logprobs is None


def test_short_lists_are_padded() -> None:
    lists = [[1, 2], None, [3], [], [4, 5], [6, 7]]
    floats = [[-1.0, -2.0], None, [-3.0], [], [-4.0, None], [-6.0, -7.0]]
    run = run_columns(table(top_token_ids=lists, top_logprobs=floats), num_support=24)
    assert run.top_token_ids is not None
    assert run.top_logprobs is not None
    assert run.top_token_ids.tolist() == [[1, 2], [-1, -1], [3, -1], [-1, -1], [4, 5], [6, 7]]
    np.testing.assert_equal(run.top_logprobs[4], [-4.0, np.nan])
    np.testing.assert_equal(run.top_logprobs[2], [-3.0, np.nan])
