from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from trace_audit.diff.bootstrap import NUM_DRAWS, Resampler
from trace_audit.diff.estimators import GroupedTokens
from trace_audit.diff.intervals import detectable_change, rare_share_interval
from trace_audit.diff.quantiles import groups_for_upper_bound, quantile_interval


def grouped(sizes: list[int], **options: float) -> GroupedTokens:
    group = np.repeat(np.arange(len(sizes)), sizes).astype(np.int64)
    return GroupedTokens(group, Resampler(len(sizes)), **options)


def test_mean_has_a_t_interval_on_linearized_group_residuals() -> None:
    # Groups (1, 2), (3), (8): R = 14/4 = 3.5, residuals 3 - 7 = -4, 3 - 3.5 = -0.5, 8 - 3.5 = 4.5.
    estimate = grouped([2, 1, 1]).mean(np.array([1.0, 2.0, 3.0, 8.0]))
    error = math.sqrt(3 / 2 * (16 + 0.25 + 20.25)) / 4
    half = float(stats.t.ppf(0.975, 2)) * error
    assert estimate.value == 3.5
    assert estimate.interval is not None
    assert estimate.interval.method == "t"
    assert estimate.interval.low == pytest.approx(3.5 - half)
    assert estimate.interval.high == pytest.approx(3.5 + half)
    variance = float(np.var([1.0, 2.0, 3.0, 8.0]))
    assert estimate.effective_n == pytest.approx(4 / max(1.0, error**2 / (variance / 4)))
    power = float(stats.t.ppf(0.975, 2) + stats.t.ppf(0.8, 2)) * error
    assert estimate.detectable == pytest.approx(power)


def test_a_ratio_of_sums_is_paired_by_group() -> None:
    # Sums (3, 2), (3, 1), (8, 1): R = 14/4 = 3.5 with the residuals of the mean above.
    group = [2, 1, 1]
    estimate = grouped(group).ratio(np.array([1.0, 2.0, 3.0, 8.0]), np.array([0.5, 1.5, 1.0, 1.0]))
    error = math.sqrt(3 / 2 * (16 + 0.25 + 20.25)) / 4
    half = float(stats.t.ppf(0.975, 2)) * error
    assert estimate.value == 3.5
    assert estimate.interval is not None
    assert estimate.interval.low == pytest.approx(3.5 - half)
    assert estimate.interval.high == pytest.approx(3.5 + half)


def test_one_group_has_no_interval() -> None:
    estimate = grouped([3]).mean(np.array([1.0, 2.0, 3.0]))
    assert estimate.value == 2.0
    assert estimate.interval is None
    assert estimate.effective_n is None


def test_tokens_of_a_group_that_move_together_count_once() -> None:
    estimate = grouped([50, 50, 50]).mean(np.repeat([1.0, 2.0, 4.0], 50))
    assert estimate.effective_n is not None
    assert estimate.effective_n < 3


def test_design_effect_is_at_least_one() -> None:
    # Every group has the same mean: grouping makes the mean look better than independence.
    estimate = grouped([2, 2, 2]).mean(np.array([0.0, 1.0, 0.0, 1.0, 0.0, 1.0]))
    assert estimate.effective_n == 6


def test_more_than_a_hundred_groups_are_bootstrapped_and_reproducible() -> None:
    values = np.random.default_rng(1).normal(size=303)
    first, second = (grouped([3] * 101).mean(values) for _ in range(2))
    assert first == second
    assert first.interval is not None
    assert first.interval.method == "bootstrap"
    spread = values.reshape(101, 3).mean(axis=1).std(ddof=1) / math.sqrt(101)
    assert (first.interval.high - first.interval.low) / (2 * 1.96 * spread) == pytest.approx(
        1, abs=0.1
    )


def test_interval_covers_the_mean_where_a_per_token_one_does_not() -> None:
    # Twelve sequences of 64 tokens share a drift each: the trap of per-token intervals.
    generator = np.random.default_rng(7)
    covered, naive, repeats = 0, 0, 400
    for _ in range(repeats):
        drift = np.repeat(generator.normal(size=12), 64)
        values = drift + generator.normal(size=768)
        interval = grouped([64] * 12).mean(values).interval
        assert interval is not None
        covered += interval.low <= 0 <= interval.high
        naive += abs(values.mean()) <= 1.96 * values.std() / math.sqrt(768)
    # Binomial standard error at 0.95 is 0.011.
    assert 0.91 <= covered / repeats <= 0.985
    assert naive / repeats < 0.6


def test_share_without_an_event_has_the_rule_of_three() -> None:
    share = grouped([10, 10], design_effect=2.0).share(np.zeros(20, dtype=bool))
    assert share.value == 0.0
    assert share.effective_n == 10
    assert share.interval is not None
    assert (share.interval.low, share.interval.high) == (0.0, 0.3)
    everything = grouped([10, 10], design_effect=2.0).share(np.ones(20, dtype=bool))
    assert everything.interval is not None
    assert (everything.interval.low, everything.interval.high) == (0.7, 1.0)


def test_share_of_few_events_is_clopper_pearson_on_the_effective_n() -> None:
    interval = rare_share_interval(0.05, 60.0)
    assert interval.low == pytest.approx(float(stats.beta.ppf(0.025, 3, 58)))
    assert interval.high == pytest.approx(float(stats.beta.ppf(0.975, 4, 57)))
    events = np.zeros(40, dtype=bool)
    events[[3, 17, 30]] = True
    share = grouped([10] * 4).share(events)
    assert share.interval is not None
    assert share.interval.method == "clopper-pearson"
    assert share.effective_n is not None
    expected = rare_share_interval(3 / 40, share.effective_n)
    assert share.interval == expected


def test_share_of_many_events_uses_the_group_interval_inside_zero_and_one() -> None:
    events = np.repeat([True, False], 30)
    share = grouped([30, 30]).share(events)
    assert share.interval is not None
    assert share.interval.method == "t"
    assert (share.interval.low, share.interval.high) == (0.0, 1.0)


def test_quantiles_are_exact_points_inside_their_intervals() -> None:
    values = np.abs(np.random.default_rng(3).normal(size=4000))
    estimates = grouped([40] * 100).abs_quantiles(values, (0.5, 0.99))
    for estimate, level in zip(estimates, (0.5, 0.99), strict=True):
        assert estimate.value == np.quantile(values, level)
        assert estimate.interval is not None
        true = float(stats.halfnorm.ppf(level))
        assert estimate.interval.low <= estimate.value <= estimate.interval.high
        assert estimate.interval.low * 0.95 <= true <= estimate.interval.high * 1.05
        # As wide as order statistics say, within the histogram's resolution.
        error = math.sqrt(level * (1 - level) / 4000) / float(2 * stats.norm.pdf(true))
        width = (estimate.interval.high - estimate.interval.low) / (2 * 1.96 * error)
        assert 0.6 < width < 1.8


def test_a_quantiles_interval_is_order_statistics_of_the_binomial() -> None:
    # 200 independent tokens in many groups: the median has 100 on each side: the normal form.
    ordered = np.arange(1.0, 201.0)
    found = quantile_interval(ordered, 0.5, 200.0, 10**6)
    half = 1.959964 * math.sqrt(0.25 / 200)
    assert (found.low, found.high) == (
        math.floor((0.5 - half) * 200),
        math.ceil((0.5 + half) * 200) + 1,
    )
    few = quantile_interval(ordered, 0.99, 200.0, 10**6)
    low, high = stats.beta.ppf(0.025, 2, 199), stats.beta.ppf(0.975, 3, 198)
    assert few.low == math.floor((1 - high) * 200)
    # (1 - low) * 200 = 199.8: nothing in the sample is certain to be above the quantile.
    assert (1 - low) * 200 > 199
    assert few.high == math.inf


def test_the_number_of_groups_that_give_a_quantile_an_upper_bound_is_the_first_that_does() -> None:
    needed = groups_for_upper_bound(0.99, 200.0, 256, 8)
    assert needed is not None

    def high(groups: int) -> float:
        size = round(256 * groups / 8)
        return quantile_interval(np.arange(1.0, size + 1), 0.99, 25.0 * groups, groups).high

    assert math.isinf(high(needed - 1))
    assert math.isfinite(high(needed))


def test_quantiles_of_zeros_are_zero() -> None:
    estimate = grouped([50] * 8).abs_quantiles(np.zeros(400), (0.5,))[0]
    assert estimate.interval is not None
    assert (estimate.value, estimate.interval.low, estimate.interval.high) == (0.0, 0.0, 0.0)


def test_bootstrap_ratio_is_a_ratio_of_sums() -> None:
    estimate = grouped([2, 2, 1]).bootstrap_ratio(
        np.array([1.0, 0, 1, 1, 0]), np.array([0.5, 0.5, 0.5, 0.25, 0.25])
    )
    assert estimate.value == 1.5
    assert estimate.interval is not None
    assert estimate.interval.low < 1.5 < estimate.interval.high


def test_resampler_draws_whole_groups() -> None:
    sums = Resampler(4).sums(np.array([[1.0, 10.0]] * 4))
    assert sums.shape == (NUM_DRAWS, 2)
    assert (sums == [4.0, 40.0]).all()
    one_hot = Resampler(4).sums(np.eye(4))
    assert (one_hot == np.round(one_hot)).all()
    assert one_hot.std() > 0.5


def test_streamed_draws_equal_cached_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = np.random.default_rng(0).normal(size=(37, 3))
    cached = Resampler(37).sums(columns)
    monkeypatch.setattr("trace_audit.diff.bootstrap._CACHED_ELEMENTS", 0)
    np.testing.assert_allclose(Resampler(37).sums(columns), cached, rtol=1e-12)


def test_detectable_change_has_eighty_percent_power() -> None:
    generator = np.random.default_rng(5)
    groups, error = 16, 0.25
    change = detectable_change(error, groups)
    samples = change + generator.normal(scale=error * math.sqrt(groups), size=(4000, groups))
    t = samples.mean(axis=1) / (samples.std(axis=1, ddof=1) / math.sqrt(groups))
    power = (np.abs(t) > float(stats.t.ppf(0.975, groups - 1))).mean()
    assert power == pytest.approx(0.8, abs=0.04)
