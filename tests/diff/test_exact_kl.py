"""The exact KL in a report: beside the estimate at the same positions, or n/a with a reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.diff.synthetic import FakeAudit, Logits, compare_all, log_softmax, model_audit
from trace_audit.diff import exact_kl as module
from trace_audit.diff.agreement import Agreement, ExactCheck
from trace_audit.diff.compare import Comparison, compare
from trace_audit.diff.exact_kl import exact_warnings
from trace_audit.diff.source import AuditSource
from trace_audit.report.terminal import render_terminal
from trace_audit.storage.schema import EXACT_KL_SCHEMA

SEQUENCES, LENGTH = 8, 32
# Rows of the trace where the record kept whole distributions: of five sequences, two in the last.
KEPT = np.array([3, 40, 41, 70, 100, 130, 250, 255])


def logits(sigma: float) -> Logits:
    generator = np.random.default_rng(0)
    record = generator.normal(0, 2.5, (SEQUENCES * LENGTH, 60))
    return record + sigma * generator.normal(0, 1.0, record.shape)


def kl(x: Logits, y: Logits) -> Logits:
    a, b = log_softmax(x), log_softmax(y)
    result: Logits = (np.exp(a) * (a - b)).sum(axis=1)
    return result


def exact_table(candidate: Logits, rows: np.ndarray = KEPT) -> pa.Table:
    forward, backward = kl(logits(0), candidate)[rows], kl(candidate, logits(0))[rows]
    columns = [rows // LENGTH, rows % LENGTH, forward, backward]
    arrays = [pa.array(c, f.type) for c, f in zip(columns, EXACT_KL_SCHEMA, strict=True)]
    return pa.table(arrays, schema=EXACT_KL_SCHEMA)


@pytest.fixture
def audit(monkeypatch: pytest.MonkeyPatch) -> FakeAudit:
    """Runs record, noisy, other (its exact KL is missing) and same (bit-equal)."""
    runs = {"record": logits(0), "noisy": logits(0.1), "other": logits(0.2), "same": logits(0)}
    tables = {"noisy": exact_table(logits(0.1)), "same": exact_table(logits(0))}
    monkeypatch.setattr(module, "full_logprobs_entry", lambda audit: {"size": 1})
    monkeypatch.setattr(module, "read_exact_kl", lambda audit, run: tables.get(run))
    return model_audit(runs, length=LENGTH)


def one(data: FakeAudit, candidate: str, baseline: str = "record", **options: Any) -> Comparison:
    return compare(AuditSource(data), baseline, candidate, **options)  # type: ignore[arg-type]


def test_values_and_the_paired_difference(audit: FakeAudit) -> None:
    comparison = one(audit, "noisy")
    exact = kl(logits(0), logits(0.1))[KEPT]
    metric = comparison.summary.metric("kl.exact")
    assert metric is not None
    assert metric.value == pytest.approx(exact.mean(), rel=1e-9)
    assert metric.interval is not None
    assert metric.interval.low < exact.mean() < metric.interval.high
    assert comparison.pair.exact is not None
    terms = comparison.pair.exact.kl()
    assert terms is not None
    difference = terms.estimate - exact
    check = comparison.summary.exact_check
    assert check is not None
    assert check.forward == Agreement(
        positions=len(KEPT),
        exact=pytest.approx(exact.mean()),
        estimate=pytest.approx(terms.estimate.mean()),
        lower_bound=pytest.approx(terms.lower_bound.mean()),
        difference=pytest.approx(difference.mean()),
        standard_error=pytest.approx(difference.std(ddof=1) / np.sqrt(len(KEPT))),
    )
    assert metric.note is not None
    assert metric.note.startswith(f"at {len(KEPT)} positions; the estimate there is ")
    backward = comparison.summary.metric("kl.exact_reverse")
    assert backward is not None
    assert backward.value == pytest.approx(kl(logits(0.1), logits(0))[KEPT].mean(), rel=1e-9)


def test_the_record_as_candidate_swaps_the_directions(audit: FakeAudit) -> None:
    there, back = one(audit, "noisy").summary, one(audit, "record", baseline="noisy").summary
    for name, other in (("kl.exact", "kl.exact_reverse"), ("kl.exact_reverse", "kl.exact")):
        a, b = there.metric(name), back.metric(other)
        assert a is not None
        assert b is not None
        assert a.value == b.value


@pytest.mark.parametrize(
    ("baseline", "candidate", "reason"),
    [
        ("noisy", "other", "neither run is the record"),
        ("record", "other", "other has no exact KL"),
    ],
)
def test_not_available_with_a_reason(
    audit: FakeAudit, baseline: str, candidate: str, reason: str
) -> None:
    summary = one(audit, candidate, baseline).summary
    for name in ("kl.exact", "kl.exact_reverse"):
        metric = summary.metric(name)
        assert metric is not None
        assert metric.value is None
        assert metric.note is not None
        assert metric.note.startswith(reason)
    assert summary.exact_check is None


def test_a_trace_recorded_without_the_option_says_so() -> None:
    data = model_audit({"record": logits(0), "noisy": logits(0.1)}, length=LENGTH)
    metric = one(data, "noisy").summary.metric("kl.exact")
    assert metric is not None
    assert metric.note == "the trace was recorded without --exact-positions"


def test_bit_equal_runs_have_no_check(audit: FakeAudit) -> None:
    summary = one(audit, "same").summary
    assert summary.bitwise
    assert summary.exact_check is None


def test_a_position_that_is_not_compared_is_left_out(
    audit: FakeAudit, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = KEPT[KEPT < 3 * LENGTH]
    audit.infos["noisy"]["subset"] = ["s0", "s1", "s2"]
    audit.tables["noisy"] = audit.tables["noisy"].slice(0, 3 * LENGTH)
    check = one(audit, "noisy").summary.exact_check
    assert check is not None
    assert check.forward is not None
    assert check.forward.positions == len(rows)
    assert check.forward.exact == pytest.approx(kl(logits(0), logits(0.1))[rows].mean())


def test_an_infinite_position_is_counted_left_out_and_fails_a_gate(
    audit: FakeAudit, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = exact_table(logits(0.1))
    values = table["kl_from_record"].to_numpy().copy()
    values[2] = np.inf
    table = table.set_column(2, EXACT_KL_SCHEMA.field("kl_from_record"), pa.array(values))
    monkeypatch.setattr(module, "read_exact_kl", lambda audit, run: table)
    metric = one(audit, "noisy").summary.metric("kl.exact")
    assert metric is not None
    assert metric.unbounded == 1
    assert metric.value == pytest.approx(np.delete(values, 2).mean())
    assert "infinite or not a number at 1 more" in str(metric.note)


def test_a_wrong_estimate_is_warned_of() -> None:
    agreement = Agreement(
        positions=512, exact=1.0, estimate=1.05, lower_bound=0.5, difference=0.05,
        standard_error=0.01,
    )  # fmt: skip
    assert agreement.standard_errors == pytest.approx(5)
    said = exact_warnings(ExactCheck(forward=agreement, reverse=None))
    assert said == (
        "the KL estimate is 5.0 standard errors from the exact KL at 512 positions; "
        "believe kl.exact",
    )
    fine = replace(agreement, difference=0.03)
    assert exact_warnings(ExactCheck(forward=fine, reverse=agreement)) == ()
    assert exact_warnings(None) == ()
    assert replace(agreement, standard_error=None).standard_errors is None


def test_the_terminal_shows_both(audit: FakeAudit) -> None:
    summary, _ = compare_all(audit, "record", ["noisy"])
    text = render_terminal(summary, width=100, color=False)
    assert "exact KL(baseline||candidate)" in text
    assert "kl.exact: at 8 positions; the estimate there is" in text
