from __future__ import annotations

from typing import Any

import numpy as np

from tests.diff.synthetic import index_of, make_sequences, run_rows, run_table
from trace_audit.diff.align import AlignedPair, align
from trace_audit.diff.bootstrap import Resampler
from trace_audit.diff.slices import confidence_slices, launch_slices, phase_slices


def pair(**columns: Any) -> AlignedPair:
    """Two sequences of four tokens; |delta| is 0.1 to 0.4 by step; both runs have the columns."""
    sequences = make_sequences(np.zeros((2, 4), dtype=np.int64))
    trace = index_of(sequences)
    delta = np.tile([0.1, 0.2, 0.3, 0.4], 2)
    doubled = {name: values * 2 for name, values in columns.items()}
    tables = {
        "record": run_table(sequences, {"logprob": np.full(8, -1.0), **doubled}),
        "b": run_table(sequences, {"logprob": -1.0 + delta, **doubled}),
    }
    return align(trace, *(run_rows(trace, name, table) for name, table in tables.items()))


def means(slices: object) -> dict[str, tuple[int, float]]:
    return {s.label: (s.tokens, round(s.mean_abs_delta, 6)) for s in slices}  # type: ignore[attr-defined]


def test_by_phase() -> None:
    marked = pair(phase=["prefill", "decode", "decode", None])
    assert means(phase_slices(marked, Resampler(2))) == {"prefill": (2, 0.1), "decode": (4, 0.25)}


def test_by_tokens_of_the_launch() -> None:
    ones = [1, 1, 1, 1]
    marked = pair(launch_tokens=[1, 2, 256, 257], launch_requests=ones, chunk_start=ones)
    assert means(launch_slices(marked, Resampler(2))) == {
        "1": (2, 0.1),
        "2": (2, 0.2),
        "129-256": (2, 0.3),
        "257-512": (2, 0.4),
    }


def test_by_confidence_of_the_baseline() -> None:
    # Float32, as it is stored, of just over a half.
    best = np.log(np.array([0.3, 0.5000001, 0.95, 0.9995]))
    marked = pair(top_logprobs=[[value] for value in best.tolist()])
    assert means(confidence_slices(marked, Resampler(2))) == {
        "0-0.5": (2, 0.1),
        "0.5-0.9": (2, 0.2),
        "0.9-0.99": (2, 0.3),
        "0.999-1": (2, 0.4),
    }


def test_runs_without_the_columns_have_no_slices() -> None:
    for slices in (phase_slices, launch_slices, confidence_slices):
        assert slices(pair(), Resampler(2)) == ()
