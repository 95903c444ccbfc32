from __future__ import annotations

import numpy as np
import pytest

from tests.diff.synthetic import PROMPT_LENGTH, logprob_pair
from trace_audit.diff.align import AlignedPair
from trace_audit.diff.bootstrap import Resampler
from trace_audit.diff.metrics import MetricTable
from trace_audit.diff.structure import (
    bucket_edges,
    first_place,
    influence,
    position_buckets,
    worst_rows,
)
from trace_audit.diff.summary import Influence, Place


def persistent_from(position: int, length: int = 300) -> np.ndarray:
    """Deltas [4, length] that are zero before an absolute position and 0.3 from it on."""
    delta = np.zeros((4, length))
    delta[:, position - PROMPT_LENGTH :] = 0.3
    return delta


def test_an_onset_shows_in_the_first_difference_and_the_buckets() -> None:
    delta = persistent_from(97)
    pair = logprob_pair(np.full(delta.shape, -1.0), -1.0 + delta)
    assert first_place(pair, pair.delta != 0) == Place(sequence_id="s0", step=92, position=97)
    for bucket in position_buckets(pair, Resampler(4)):
        if bucket.end <= 97:
            assert bucket.mean_abs_delta == 0
        elif bucket.start >= 97:
            assert bucket.mean_abs_delta == pytest.approx(0.3)
        else:
            assert 0 < bucket.mean_abs_delta < 0.3


def test_first_place_is_the_lowest_position_then_the_first_sequence() -> None:
    pair = logprob_pair(np.full((3, 4), -1.0), np.full((3, 4), -1.0))
    rows = np.zeros(12, dtype=bool)
    rows[[3, 6, 10]] = True
    assert first_place(pair, rows) == Place(sequence_id="s1", step=2, position=PROMPT_LENGTH + 2)
    assert first_place(pair, np.zeros(12, dtype=bool)) is None


@pytest.mark.parametrize(("first", "last"), [(0, 0), (0, 5), (7, 7), (5, 132), (1, 100_000)])
def test_bucket_edges_cover_every_position_once(first: int, last: int) -> None:
    edges = bucket_edges(first, last)
    assert edges[0] == first
    assert edges[-1] == last + 1
    assert (np.diff(edges) > 0).all()
    assert len(edges) <= 33


def test_buckets_count_every_finite_token() -> None:
    candidate = np.full((5, 200), -1.2)
    candidate[2, 50] = np.nan
    pair = logprob_pair(np.full((5, 200), -1.0), candidate)
    buckets = position_buckets(pair, Resampler(5))
    assert sum(bucket.tokens for bucket in buckets) == 999
    for bucket in buckets:
        assert bucket.interval is not None
        assert bucket.interval.low >= 0
        assert bucket.mean_abs_delta == pytest.approx(0.2, rel=1e-5)


def test_worst_rows_put_non_finite_ones_first_and_leave_equal_ones_out() -> None:
    pair = logprob_pair([-1.0] * 5, [-1.5, -1.0, np.nan, -3.0, -0.9])
    assert worst_rows(pair, 10) == [2, 3, 0, 4]
    assert worst_rows(pair, 2) == [2, 3]


def found_influence(pair: AlignedPair) -> Influence | None:
    return influence(pair, MetricTable(pair, Resampler(len(pair.group_ids))).sizes)


def test_influence_names_the_group_that_moves_the_mean_most() -> None:
    candidate = np.full((4, 10), -1.1)
    candidate[2] = -2.0
    found = found_influence(logprob_pair(np.full((4, 10), -1.0), candidate))
    assert found is not None
    assert found.group_id == "s2"
    assert found.share == pytest.approx(10 / 13, rel=1e-5)
    assert found.token_share == 0.25


def test_influence_is_by_group() -> None:
    candidate = np.full((4, 10), -1.1)
    candidate[2] = -2.0
    pair = logprob_pair(np.full((4, 10), -1.0), candidate, groups=["x", "y", "y", "z"])
    found = found_influence(pair)
    assert found is not None
    assert found.group_id == "y"
    assert pair.group_ids == ("x", "y", "z")


def test_no_difference_has_no_influence() -> None:
    assert found_influence(logprob_pair(np.full((2, 3), -1.0), np.full((2, 3), -1.0))) is None
