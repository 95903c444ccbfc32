from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.diff.synthetic import logprob_pair
from tests.diff.test_metrics import sampled, table_of, value
from trace_audit.diff.bootstrap import Resampler
from trace_audit.diff.catalog_rl import RL
from trace_audit.diff.estimators import GroupedTokens
from trace_audit.diff.metric import Metric
from trace_audit.diff.rl import ess_share


@pytest.fixture(scope="module")
def hand() -> dict[str, Metric]:
    """Ratios 1.25 and 0.5 in one sequence, 1 and 1.05 in the other."""
    return sampled(1.0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("clip.high", 1 / 4),
        ("clip.low", 1 / 4),
        ("ess.share", 3.8**2 / (4 * (1.25**2 + 0.5**2 + 1 + 1.05**2))),
        ("ess.clamped", 3.8**2 / (4 * (1.25**2 + 0.5**2 + 1 + 1.05**2))),
        ("rho.chi2", (1.25**2 + 0.5**2 + 1 + 1.05**2) / 4 - 1),
        ("rho.geometric", (math.sqrt(1.25 * 0.5) + math.sqrt(1.05)) / 2),
        ("rho.worst", math.sqrt(1.25 * 0.5)),
        ("logppl.gap", -math.log(1.25 * 0.5 * 1.05) / 4),
    ],
)
def test_hand_computed(hand: dict[str, Metric], name: str, expected: float) -> None:
    # Logprobs are stored as float32: 6e-8 of a logprob near 1, in each of two runs.
    assert value(hand, name) == pytest.approx(expected, rel=1e-6, abs=2e-7)


def test_every_metric_of_the_section_is_tested_above(hand: dict[str, Metric]) -> None:
    assert {name for name in RL if hand[name].value is not None} == set(RL)


def test_signs_are_in_words_and_the_farthest_sequence_is_named(hand: dict[str, Metric]) -> None:
    assert hand["logppl.gap"].note == "the candidate is less sure of the tokens than the baseline"
    assert hand["rho.worst"].note == "sequence s0"


def test_ess_is_not_clamped_unless_it_says_so() -> None:
    tokens = GroupedTokens(np.arange(2), Resampler(2))
    ratio = np.array([4.0, 1.0])
    assert ess_share(tokens, ratio).value == pytest.approx(25 / (2 * 17))
    assert ess_share(tokens, np.minimum(ratio, 2.0)).value == pytest.approx(9 / (2 * 5))
    # One weight that dominates: a clamped ESS would stay near one half.
    assert ess_share(tokens, np.array([1e6, 1.0])).value == pytest.approx(0.5, rel=1e-5)


def test_ess_has_the_interval_of_its_linearization() -> None:
    generator = np.random.default_rng(0)
    truth = math.exp(-(0.5**2))  # Lognormal weights of sigma 0.5: E[w]^2 / E[w^2].
    covered = 0
    for _ in range(400):
        group = np.repeat(np.arange(40), 50).astype(np.int64)
        estimate = ess_share(
            GroupedTokens(group, Resampler(40)), np.exp(0.5 * generator.normal(size=2000))
        )
        assert estimate.interval is not None
        covered += estimate.interval.low <= truth <= estimate.interval.high
    assert covered / 400 >= 0.92


def test_equal_runs_have_ratios_of_one() -> None:
    lines = np.full((3, 4), -1.0)
    pair = logprob_pair(lines, lines, source="imported")
    metrics = table_of(replace(pair, baseline_run=replace(pair.baseline_run, name="imported")))
    expected = {
        "clip.high": 0.0,
        "clip.low": 0.0,
        "ess.share": 1.0,
        "ess.clamped": 1.0,
        "rho.chi2": 0.0,
        "rho.geometric": 1.0,
        "rho.worst": 1.0,
        "logppl.gap": 0.0,
    }
    assert {name: value(metrics, name) for name in RL} == expected
    assert metrics["logppl.gap"].note == "both runs are as sure of the tokens"
