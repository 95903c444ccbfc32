"""Imported logprobs against the recorded ones: a shift by one token is seen."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest

from trace_audit.storage.imported import ImportedSequence, shift_warning

LENGTHS = {0: 9, 2: 1, 3: 14}  # sequence 1 came without logprobs


def recorded() -> dict[int, list[float]]:
    generator = np.random.default_rng(0)
    return {i: (-generator.exponential(2.0, LENGTHS.get(i, 5))).tolist() for i in range(4)}


def told(given: dict[int, list[float]]) -> str | None:
    ours = recorded()
    table = pa.table(
        {
            "sequence_index": [i for i, values in ours.items() for _ in values],
            "step": [step for values in ours.values() for step in range(len(values))],
            "logprob": pa.array([x for values in ours.values() for x in values], pa.float32()),
        }
    )
    sequences = [
        ImportedSequence(
            sequence_index=i,
            sequence_id=str(i),
            prompt_length=3,
            token_ids=[1] * len(values),
            logprobs=values,
        )
        for i, values in given.items()
    ]
    return shift_warning(sequences, table)


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.5])
def test_logprobs_in_place_are_no_matter(noise: float) -> None:
    generator = np.random.default_rng(1)
    given = {i: [x + generator.normal(0, noise) for x in recorded()[i]] for i in LENGTHS}
    assert told(given) is None


@pytest.mark.parametrize(
    ("moved", "neighbour"),
    [(lambda x: [*x[1:], -1.0], "after"), (lambda x: [-1.0, *x[:-1]], "before")],
)
def test_a_shift_by_one_is_told_with_its_direction(moved, neighbour: str) -> None:
    given = {i: moved(recorded()[i]) for i in LENGTHS}
    warning = told(given)
    assert warning is not None
    assert f"the token {neighbour} its own" in warning


def test_tokens_without_a_logprob_hide_no_shift() -> None:
    given = {i: [*recorded()[i][1:], -1.0] for i in LENGTHS}
    # The filler for tokens 4 to 6 moved with the rest.
    given[3][3:7] = [-90.0, *[math.nan] * 3]
    assert told(given) is not None


def test_sequences_of_one_token_have_no_neighbours() -> None:
    assert told({2: [-40.0]}) is None


def test_other_logprobs_are_not_called_shifted() -> None:
    generator = np.random.default_rng(2)
    assert told({i: (-generator.exponential(2.0, n)).tolist() for i, n in LENGTHS.items()}) is None
