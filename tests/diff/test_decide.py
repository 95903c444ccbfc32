from __future__ import annotations

import math

import pytest
from scipy import stats

from trace_audit.diff.decide import groups_to_decide
from trace_audit.diff.intervals import rare_share_interval, t_interval
from trace_audit.diff.metric import Interval


def half_width(error_of_one: float, groups: int) -> float:
    return float(stats.t.ppf(0.975, groups - 1)) * error_of_one / math.sqrt(groups)


@pytest.mark.parametrize("threshold", [1.1, 0.9])
def test_the_answer_is_the_first_number_whose_interval_decides(threshold: float) -> None:
    found = t_interval(1.0, 1.0 / math.sqrt(8), 8)
    needed = groups_to_decide(1.0, found, threshold, 8, None)
    assert needed is not None
    assert half_width(1.0, needed) <= 0.1 + 1e-12 < half_width(1.0, needed - 1)
    assert needed == 387


def test_a_bootstrap_interval_shrinks_by_the_root_of_the_groups() -> None:
    found = Interval(low=0.8, high=1.2, method="bootstrap")
    assert groups_to_decide(1.0, found, 1.05, 200, None) == 200 * 16


def test_a_share_without_events_needs_three_over_the_threshold() -> None:
    # 3 / N_eff = 0.003 at 8 groups; 0.001 needs three times as many tokens.
    found = rare_share_interval(0.0, 1000.0)
    assert groups_to_decide(0.0, found, 0.001, 8, 1000.0) == 24


def test_a_rare_share_is_decided_by_its_binomial_interval() -> None:
    found = rare_share_interval(0.002, 1000.0)
    needed = groups_to_decide(0.002, found, 0.004, 10, 1000.0)
    assert needed is not None
    assert rare_share_interval(0.002, 100.0 * needed).high <= 0.004
    assert rare_share_interval(0.002, 100.0 * (needed - 1)).high > 0.004


def test_a_value_at_its_threshold_is_never_decided() -> None:
    assert groups_to_decide(1.0, t_interval(1.0, 0.1, 8), 1.0, 8, None) is None
    assert groups_to_decide(0.0, rare_share_interval(0.0, 100.0), 0.0, 8, 100.0) is None
