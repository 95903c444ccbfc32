"""What the rows of two runs that must be bit-equal say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.diff.run_infos import info
from tests.diff.synthetic import FakeAudit, Logits, model_audit, run_table
from trace_audit.diff.compare import compare
from trace_audit.diff.source import AuditSource
from trace_audit.diff.summary import PairSummary
from trace_audit.report.fault import fault_words

LENGTH = 16


def logits() -> Logits:
    return np.random.default_rng(0).normal(0, 2.5, (4 * LENGTH, 60))


def audit(candidate: Logits, **changed: Any) -> FakeAudit:
    data = model_audit({"record": logits(), "other": candidate}, length=LENGTH)
    data.infos = {"record": info(), "other": info(**changed)}
    return data


def summary(data: FakeAudit) -> PairSummary:
    return compare(AuditSource(data), "record", "other").summary  # type: ignore[arg-type]


def with_columns(data: FakeAudit, name: str, **columns: Any) -> None:
    table = data.tables[name]
    own = {field: table[field].to_numpy() for field in ("logprob", "entropy")}
    hashes = {"logits_hash": table["logits_hash"].to_pylist()}
    data.tables[name] = run_table(data.sequences, {**own, **hashes, **columns})


def test_rows_that_differ_though_nothing_may_are_a_fault() -> None:
    changed = logits()
    changed[[3, 20], 59] += 0.5
    pair = summary(audit(changed, pipeline_parallel_size=2, backend="process"))
    assert pair.fault
    assert pair.expected is not None
    assert pair.expected.differing_rows == 2
    assert "logprob" in pair.expected.differing_columns
    assert "logits_hash" in pair.expected.differing_columns
    assert not pair.bitwise


def test_bit_equal_rows_are_as_they_must_be() -> None:
    pair = summary(audit(logits(), pipeline_parallel_size=2))
    assert pair.bitwise
    assert not pair.fault
    assert pair.expected is not None
    assert pair.expected.differing_rows == 0


def test_rows_that_depend_on_other_sequences_are_a_fault_under_fixed_batch() -> None:
    changed = logits()
    changed[3, 59] += 0.5
    data = audit(changed, fixed_batch=True)
    data.infos["record"] = info(fixed_batch=True)
    data.infos["other"] |= {"repeat_kind": "batch"}
    pair = summary(data)
    assert pair.fault
    assert "(other sequences beside the same ones)" in fault_words(pair)


def test_the_same_rows_are_drift_where_a_bit_may_change() -> None:
    changed = logits()
    changed[3, 59] += 0.5
    pair = summary(audit(changed, num_threads=2))
    assert not pair.fault
    assert pair.expected is None


def test_any_stored_column_counts() -> None:
    data = audit(logits(), timeout_seconds=5)
    for name in ("record", "other"):
        with_columns(data, name)
    entropy = data.tables["other"]["entropy"].to_numpy().copy()
    entropy[7] = np.nextafter(entropy[7], np.float32(99))
    with_columns(data, "other", entropy=entropy)
    pair = summary(data)
    assert pair.bitwise
    assert pair.fault
    assert pair.expected is not None
    assert (pair.expected.differing_rows, pair.expected.differing_columns) == (1, ("entropy",))


def test_values_that_are_missing_in_both_are_equal() -> None:
    data = audit(logits(), timeout_seconds=5)
    for name in ("record", "other"):
        entropy = np.full(4 * LENGTH, np.nan, dtype=np.float32)
        with_columns(data, name, entropy=entropy)
    assert not summary(data).fault


def launches(data: FakeAudit, name: str, requests: int, row: int) -> None:
    count = np.full(4 * LENGTH, 4)
    count[row] = requests
    columns = {"launch_tokens": count, "launch_requests": count, "chunk_start": 0 * count}
    with_columns(data, name, **{key: value.tolist() for key, value in columns.items()})


@pytest.mark.parametrize(("requests", "void"), [(4, False), (3, True)])
def test_other_launches_void_the_expectation(requests: int, void: bool) -> None:
    changed = logits()
    changed[3, 59] += 0.5
    data = audit(changed, timeout_seconds=5)
    launches(data, "record", 4, row=2)
    launches(data, "other", requests, row=2)
    pair = summary(data)
    assert pair.fault is not void
    assert pair.expected is not None
    if void:
        assert pair.expected.void == (
            "1 of 64 rows come from launches of another shape, the first at position 7 "
            "(sequence s0, step 2)"
        )


def test_launches_that_one_run_does_not_tell_void_nothing() -> None:
    changed = logits()
    changed[3, 59] += 0.5
    data = audit(changed, timeout_seconds=5)
    launches(data, "other", 3, row=2)
    assert summary(data).fault
