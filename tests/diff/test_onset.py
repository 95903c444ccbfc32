from __future__ import annotations

import numpy as np
import pytest

from tests.diff.synthetic import PROMPT_LENGTH, logprob_pair
from trace_audit.diff.align import AlignedPair
from trace_audit.diff.bootstrap import Resampler
from trace_audit.diff.drift import drift, theil_sen
from trace_audit.diff.onset import onset
from trace_audit.diff.periods import periods
from trace_audit.diff.slices import worst_share


def moved(delta: np.ndarray) -> AlignedPair:
    """Deltas [S, T]; step t is at absolute position t + 5."""
    return logprob_pair(np.full(delta.shape, -1.0), -1.0 + delta)


def from_position(position: int, size: float = 0.3, length: int = 300) -> np.ndarray:
    delta = np.zeros((4, length))
    delta[:, position - PROMPT_LENGTH :] = size
    return delta


def test_case_1_a_persistent_onset_at_position_97() -> None:
    found = onset(moved(from_position(97)), 0.0)
    assert found is not None
    assert (found.position, found.persistent, found.persistence) == (97, True, 1.0)
    assert (found.first, found.limit) == (PROMPT_LENGTH, 1e-6)


def test_outliers_before_it_do_not_move_the_onset() -> None:
    delta = from_position(97)
    delta[:, 3] = 5.0
    delta[1, 40:60] = 0.2
    found = onset(moved(delta), 0.0)
    assert found is not None
    assert found.position == 97


def test_what_the_floor_explains_is_no_onset() -> None:
    noise = 0.01 * np.random.default_rng(0).normal(size=(4, 300))
    delta = from_position(97) + noise
    found = onset(moved(delta), 0.05)
    assert found is not None
    assert found.position == 97
    assert onset(moved(noise), 0.05) is None
    everywhere = onset(moved(delta), 0.0)
    assert everywhere is not None
    assert everywhere.position == everywhere.first == PROMPT_LENGTH


def test_an_episode_is_not_persistent() -> None:
    delta = np.zeros((4, 300))
    delta[:, 100:140] = 0.3
    found = onset(moved(delta), 0.0)
    assert found is not None
    assert (found.position, found.persistent) == (100 + PROMPT_LENGTH, False)
    # Windows of 16 from step 100: 100, 116 and 132 (8 of 16: not over half); 13 windows in all.
    assert found.persistence == pytest.approx(2 / 13)


def test_over_half_of_sixteen_positions_is_nine() -> None:
    eight, nine = np.zeros((1, 60)), np.zeros((1, 60))
    eight[0, 20:28] = 0.3
    nine[0, 20:29] = 0.3
    assert onset(moved(eight), 0.0) is None
    found = onset(moved(nine), 0.0)
    assert found is not None
    assert found.position == 20 + PROMPT_LENGTH


def test_no_difference_has_no_onset_and_a_float_speck_is_none() -> None:
    assert onset(moved(np.zeros((4, 50))), 0.0) is None
    assert onset(moved(np.full((4, 50), 1e-7)), 0.0) is None


def test_non_finite_rows_have_moved() -> None:
    delta = np.zeros((2, 60))
    delta[:, 30:] = np.nan
    found = onset(moved(delta), 0.0)
    assert found is not None
    assert (found.position, found.persistent) == (30 + PROMPT_LENGTH, True)


def test_theil_sen_is_the_median_of_pairwise_slopes() -> None:
    # Slopes of (0,0) (1,1) (2,2) (3,30): 1, 1, 10, 1, 14.5, 28; median (1 + 10) / 2.
    x = np.array([0.0, 1.0, 2.0, 3.0])
    assert theil_sen(x, np.array([[0.0, 1.0, 2.0, 30.0]])).tolist() == [5.5]
    assert theil_sen(x, np.array([[0.0, 1.0, np.nan, 3.0]])).tolist() == [1.0]
    assert np.isnan(theil_sen(x, np.full((1, 4), np.nan))).all()


def test_drift_is_per_thousand_positions_and_covers_the_slope() -> None:
    generator = np.random.default_rng(2)
    step = np.arange(240)
    scale = np.exp(0.2 * generator.normal(size=(12, 1)))
    delta = scale * (0.1 + 0.001 * step) * generator.choice([-1.0, 1.0], size=(12, 240))
    found = drift(moved(delta), Resampler(12))
    assert found is not None
    assert found.interval is not None
    assert found.slope == pytest.approx(scale.mean() * 1.0, rel=1e-2)
    assert 0 < found.interval.low < found.slope < found.interval.high


def test_no_drift_is_zero_and_few_positions_have_none() -> None:
    flat = drift(moved(np.full((3, 100), 0.2)), Resampler(3))
    assert flat is not None
    assert flat.slope == pytest.approx(0.0, abs=1e-4)
    assert drift(moved(np.full((3, 2), 0.2)), Resampler(3)) is None


def test_a_period_names_its_residue_and_only_where_it_is_real() -> None:
    generator = np.random.default_rng(3)
    delta = 0.1 * np.abs(generator.normal(size=(8, 256)))
    position = np.arange(256) + PROMPT_LENGTH
    delta[:, position % 16 == 3] += 0.5
    found = {period.size: period for period in periods(moved(delta), (16, 64, 128))}
    assert found[16].stands_out
    assert found[16].residue == 3
    plain = np.abs(delta)
    expected = plain[:, position % 16 == 3].mean() / plain.mean()
    assert found[16].ratio == pytest.approx(expected, rel=1e-5)
    # A period of 16 shows as one of 64 and 128 too, in a residue of the same class.
    assert found[64].residue % 16 == 3


def test_noise_has_no_period() -> None:
    false = 0
    for seed in range(40):
        delta = np.abs(np.random.default_rng(seed).normal(size=(8, 260)))
        false += any(period.stands_out for period in periods(moved(delta), (16, 64, 128)))
    # 5 % for all residues together, so 2 of 40 are expected; 7 or more has probability 0.3 %.
    assert false < 7


def test_sizes_that_the_positions_do_not_cover_twice_are_absent() -> None:
    found = periods(moved(np.full((2, 100), 0.1)), (16, 64, 1, 0))
    assert [period.size for period in found] == [16]
    assert periods(moved(np.zeros((2, 100))), (16,)) == ()


def test_worst_share_by_hand() -> None:
    # 200 values: the worst two hold (50 + 50) / (100 + 198).
    kl = np.array([50.0, 50.0] + [1.0] * 198)
    assert worst_share(kl) == pytest.approx(100 / 298)
    assert worst_share(np.array([np.nan, np.inf, 2.0, 2.0])) == 0.5
    assert worst_share(np.zeros(5)) is None
    assert worst_share(None) is None
