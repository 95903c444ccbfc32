from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest

from tests.diff.synthetic import logprob_pair
from tests.diff.test_compare import audit, one
from trace_audit.diff.align import AlignedPair
from trace_audit.diff.batches import aligned_batches
from trace_audit.diff.bootstrap import Resampler
from trace_audit.diff.distributions import confidence_buckets, histogram
from trace_audit.diff.label_means import BUCKET_EDGES


def test_the_histogram_counts_zero_bins_and_non_finite_values_apart() -> None:
    deltas = np.array([0.0, 0.0, 2e-3, -2.5e-3, 0.5, math.nan, math.inf])
    found = histogram(logprob_pair(np.zeros(7), deltas))
    assert found.zero == 2
    assert found.non_finite == 2
    filled = {(round(b.low, 5), round(b.high, 5)): b.tokens for b in found.bins if b.tokens}
    assert filled == {(0.00178, 0.00316): 2, (0.31623, 0.56234): 1}
    assert found.bins[0].tokens
    assert found.bins[-1].tokens
    for left, right in zip(found.bins, found.bins[1:], strict=False):
        assert left.high == right.low


def test_a_value_on_an_edge_is_in_the_upper_bin() -> None:
    (only,) = histogram(logprob_pair([0.0], [-1.0])).bins
    assert (only.low, only.tokens) == (1.0, 1)


def test_values_beyond_the_bins_are_kept_in_open_ones() -> None:
    found = histogram(logprob_pair([0.0, 0.0], [1e-12, -1000.0]))
    assert (found.bins[0].low, found.bins[0].tokens) == (0.0, 1)
    assert (found.bins[-1].high, found.bins[-1].tokens) == (math.inf, 1)


def test_equal_runs_have_no_bins() -> None:
    found = histogram(logprob_pair([0.0, -1.0], [0.0, -1.0]))
    assert (found.zero, found.bins, found.non_finite) == (2, (), 0)


def test_confidence_buckets_partition_the_tokens_and_average_each() -> None:
    pair = one(audit(), "noisy").pair
    buckets = confidence_buckets(pair, Resampler(len(pair.group_ids)))
    assert buckets is not None
    assert [b.low for b in buckets] == list(BUCKET_EDGES[:-1])
    assert sum(b.tokens for b in buckets) == len(pair)
    (batch,) = aligned_batches(pair)
    top = batch.baseline.top_logprobs
    assert top is not None
    inside = (np.exp(top[:, 0]) >= 0.5) & (np.exp(top[:, 0]) < 0.75)
    bucket = buckets[3]
    assert bucket.tokens == inside.sum()
    assert bucket.mean_abs_delta == pytest.approx(np.abs(pair.delta[inside]).mean())
    assert bucket.interval is not None
    assert bucket.interval.low <= bucket.mean_abs_delta <= bucket.interval.high


def best_of_the_baseline(logprob: float) -> AlignedPair:
    """A pair whose baseline gives its own best token the same logprob everywhere."""
    data = audit()
    table = data.tables["record"]
    index = table.schema.get_field_index("top_logprobs")
    lists = [[logprob, *row[1:]] for row in table["top_logprobs"].to_pylist()]
    field = table.schema.field(index)
    data.tables["record"] = table.set_column(index, field, [pa.array(lists, field.type)])
    return one(data, "noisy").pair


def test_a_bucket_without_tokens_has_no_mean() -> None:
    pair = best_of_the_baseline(np.log(0.95))
    buckets = confidence_buckets(pair, Resampler(len(pair.group_ids)))
    assert buckets is not None
    assert [b.tokens for b in buckets] == [0, 0, 0, 0, 0, len(pair), 0, 0]
    assert buckets[0].mean_abs_delta is None
    assert buckets[0].interval is None


def test_a_probability_of_one_is_in_the_last_bucket() -> None:
    # float32 rounding can give a logprob a hair above 0.
    pair = best_of_the_baseline(1e-7)
    buckets = confidence_buckets(pair, Resampler(len(pair.group_ids)))
    assert buckets is not None
    assert buckets[-1].tokens == len(pair)


def test_without_best_tokens_confidence_is_not_available() -> None:
    pair = logprob_pair([0.0, -1.0], [0.0, -1.5])
    assert confidence_buckets(pair, Resampler(1)) is None
