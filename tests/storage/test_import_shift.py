"""A shift of imported logprobs by one token is found with its direction, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest

from trace_audit.storage.import_shift import found_shift

RNG = np.random.default_rng(0)
OWN = -RNG.exponential(1.0, 200)
SEQUENCE = np.repeat(np.arange(8), 25)
STEP = np.tile(np.arange(25), 8)


def moved(by: int, noise: float = 0.0) -> np.ndarray:
    rows = OWN.reshape(8, 25)
    other = np.full_like(rows, -0.7)
    if by > 0:
        other[:, :-by] = rows[:, by:]
    elif by < 0:
        other[:, -by:] = rows[:, :by]
    else:
        other = rows.copy()
    return other.ravel() + noise * RNG.normal(size=200)


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.2])
@pytest.mark.parametrize("by", [1, -1])
def test_a_shift_by_one(by, noise):
    shift = found_shift(moved(by, noise), OWN, SEQUENCE, STEP)
    assert shift is not None
    assert shift.by == by
    assert shift.correlation > 0.9 > 0.5 > shift.unshifted


@pytest.mark.parametrize("given", [moved(0), moved(0, 0.5), moved(2), moved(-2), OWN[::-1]])
def test_no_shift_by_one(given):
    assert found_shift(given, OWN, SEQUENCE, STEP) is None


def test_the_end_of_one_sequence_is_no_neighbour_of_the_next():
    alone = np.arange(200)
    assert found_shift(np.append(OWN[1:], 0.0), OWN, alone, np.zeros(200, dtype=int)) is None


@pytest.mark.parametrize("given", [np.zeros(200), np.full(200, -np.inf), np.full(200, np.nan)])
def test_constant_or_broken_logprobs_have_no_shift(given):
    assert found_shift(given, OWN, SEQUENCE, STEP) is None
    assert found_shift(OWN, given, SEQUENCE, STEP) is None


def test_few_tokens_tell_nothing():
    assert found_shift(moved(1)[:15], OWN[:15], SEQUENCE[:15], STEP[:15]) is None
