from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.diff.synthetic import logprob_pair
from trace_audit.diff.align import AlignedPair
from trace_audit.diff.bootstrap import Resampler
from trace_audit.diff.slices import confidence_slices, launch_slices, phase_slices


@pytest.fixture
def pair() -> AlignedPair:
    """Two sequences of four tokens; |delta| is 0.1 to 0.4 by step."""
    delta = np.tile([0.1, 0.2, 0.3, 0.4], (2, 1))
    return logprob_pair(np.full((2, 4), -1.0), -1.0 + delta)


def means(slices: object) -> dict[str, tuple[int, float]]:
    return {s.label: (s.tokens, round(s.mean_abs_delta, 6)) for s in slices}  # type: ignore[attr-defined]


def test_by_phase(pair: AlignedPair) -> None:
    phase = np.array(["prefill", "decode", "decode", None] * 2, dtype=object)
    marked = replace(pair, candidate=replace(pair.candidate, phase=phase))
    assert means(phase_slices(marked, Resampler(2))) == {"prefill": (2, 0.1), "decode": (4, 0.25)}


def test_by_tokens_of_the_launch(pair: AlignedPair) -> None:
    launch = np.array([[1.0, 1, 0], [2, 1, 0], [256, 1, 0], [257, 1, 0]] * 2)
    marked = replace(pair, candidate=replace(pair.candidate, launch=launch))
    assert means(launch_slices(marked, Resampler(2))) == {
        "1": (2, 0.1),
        "2": (2, 0.2),
        "129-256": (2, 0.3),
        "257-512": (2, 0.4),
    }


def test_by_confidence_of_the_baseline(pair: AlignedPair) -> None:
    best = np.log(np.array([[0.3], [0.5], [0.95], [0.9995]] * 2))
    marked = replace(pair, baseline=replace(pair.baseline, top_logprobs=best))
    assert means(confidence_slices(marked, Resampler(2))) == {
        "0-0.5": (2, 0.1),
        "0.5-0.9": (2, 0.2),
        "0.9-0.99": (2, 0.3),
        "0.999-1": (2, 0.4),
    }


def test_runs_without_the_columns_have_no_slices(pair: AlignedPair) -> None:
    for slices in (phase_slices, launch_slices, confidence_slices):
        assert slices(pair, Resampler(2)) == ()
