"""Simulated audits whose truth is known: do 95 % intervals cover it?

Sequences have random effects of their own, as tokens of one text share their drift.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from trace_audit.diff.bootstrap import Resampler
from trace_audit.diff.estimators import Estimate, GroupedTokens

SEQUENCES = [8, 16, 40, 100]
TOKENS = 48
REPEATS = 1000
COVERED = 0.92

Generator = np.random.Generator
Draw = Callable[[Generator, int], tuple[np.ndarray, np.ndarray]]


def grouped(sequences: int, lengths: np.ndarray) -> GroupedTokens:
    group = np.repeat(np.arange(sequences), lengths).astype(np.int64)
    return GroupedTokens(group, Resampler(sequences), design_effect=1.0)


def lengths_of(generator: Generator, sequences: int) -> np.ndarray:
    """Sequences end when they like: lengths differ by a factor of two."""
    return generator.integers(TOKENS // 2, TOKENS + 1, sequences)


def covers(estimate: Estimate, truth: float) -> bool:
    assert estimate.interval is not None
    return estimate.interval.low <= truth <= estimate.interval.high


def mean_delta(generator: Generator, sequences: int) -> bool:
    """A drift per sequence as large as the noise of a token."""
    lengths = lengths_of(generator, sequences)
    drift = np.repeat(generator.normal(0, 1, sequences), lengths)
    values = 0.3 + drift + generator.normal(0, 1, lengths.sum())
    return covers(grouped(sequences, lengths).mean(values), 0.3)


def mean_abs(generator: Generator, sequences: int) -> bool:
    """Sizes: skewed, with a scale per sequence."""
    lengths = lengths_of(generator, sequences)
    scale = np.repeat(np.exp(0.3 * generator.normal(size=sequences)), lengths)
    values = scale * np.abs(generator.normal(size=lengths.sum()))
    truth = np.exp(0.3**2 / 2) * np.sqrt(2 / np.pi)
    return covers(grouped(sequences, lengths).mean(values), float(truth))


def ratio_of_sums(generator: Generator, sequences: int) -> bool:
    """Two KL sums over the same sequences, with a scale per sequence that both share."""
    lengths = lengths_of(generator, sequences)
    shared = np.repeat(np.exp(0.5 * generator.normal(size=sequences)), lengths)
    below = shared * generator.chisquare(1, lengths.sum())
    above = 1.1 * shared * generator.chisquare(1, lengths.sum())
    return covers(grouped(sequences, lengths).ratio(above, below), 1.1)


def share_of_many(generator: Generator, sequences: int) -> bool:
    """A share near a fifth that varies between sequences."""
    lengths = lengths_of(generator, sequences)
    rate = np.repeat(generator.beta(6, 24, sequences), lengths)
    return covers(grouped(sequences, lengths).share(generator.random(lengths.sum()) < rate), 0.2)


def share_of_few(generator: Generator, sequences: int) -> bool:
    """A share of about one in a hundred: few events or none."""
    lengths = lengths_of(generator, sequences)
    rate = np.repeat(generator.beta(2, 198, sequences), lengths)
    return covers(grouped(sequences, lengths).share(generator.random(lengths.sum()) < rate), 0.01)


def quantile(generator: Generator, sequences: int, level: float, truth: float) -> bool:
    """The sizes of `mean_abs`; the truth is of four million such tokens."""
    lengths = lengths_of(generator, sequences)
    scale = np.repeat(np.exp(0.3 * generator.normal(size=sequences)), lengths)
    values = scale * np.abs(generator.normal(size=lengths.sum()))
    return covers(grouped(sequences, lengths).abs_quantiles(values, (level,))[0], truth)


@pytest.mark.parametrize("sequences", SEQUENCES)
@pytest.mark.parametrize(("level", "truth"), [(0.5, 0.660), (0.9, 1.775), (0.99, 3.198)])
def test_intervals_of_quantiles_cover_the_truth(level: float, truth: float, sequences: int) -> None:
    generator = np.random.default_rng([sequences, round(100 * level)])
    covered = sum(quantile(generator, sequences, level, truth) for _ in range(REPEATS)) / REPEATS
    assert covered >= COVERED, covered


@pytest.mark.parametrize("sequences", SEQUENCES)
@pytest.mark.parametrize("effect", [1.0, 3.0])
def test_no_event_is_never_a_zero_width_interval(sequences: int, effect: float) -> None:
    group = np.repeat(np.arange(sequences), TOKENS).astype(np.int64)
    tokens = GroupedTokens(group, Resampler(sequences), design_effect=effect)
    for events in (np.zeros(len(group), dtype=bool), np.ones(len(group), dtype=bool)):
        interval = tokens.share(events).interval
        assert interval is not None
        assert interval.high - interval.low == pytest.approx(3 * effect / len(group))


@pytest.mark.parametrize("sequences", SEQUENCES)
@pytest.mark.parametrize("draw", [mean_delta, mean_abs, ratio_of_sums, share_of_many, share_of_few])
def test_intervals_cover_the_truth(draw: Callable[[Generator, int], bool], sequences: int) -> None:
    generator = np.random.default_rng([sequences, len(draw.__name__)])
    covered = sum(draw(generator, sequences) for _ in range(REPEATS)) / REPEATS
    # The standard error of 1,000 repeats is 0.7 %.
    assert covered >= COVERED, covered
