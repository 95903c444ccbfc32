"""`kl.excess` against exact full-vocabulary KL, and what it refuses."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from tests.cli.test_gates import LENGTH, audit, logits
from tests.diff.synthetic import FakeAudit, Logits, log_softmax
from tests.diff.test_metrics import pair_from, table_of
from trace_audit.diff.bootstrap import Resampler
from trace_audit.diff.compare import compare
from trace_audit.diff.metric import Metric
from trace_audit.diff.metrics import MetricTable
from trace_audit.diff.source import AuditSource


def exact_kl(x: Logits, y: Logits) -> np.ndarray:
    a, b = log_softmax(x), log_softmax(y)
    result: np.ndarray = (np.exp(a) * (a - b)).sum(axis=1)
    return result


def excess(data: FakeAudit, baseline: str, candidate: str) -> Metric:
    found = compare(AuditSource(data), baseline, candidate).summary.metric("kl.excess")  # type: ignore[arg-type]
    assert found is not None
    return found


def test_it_is_the_ratio_of_two_sums_of_kl() -> None:
    data = audit(base=logits(0.1, 1), b=logits(0.15, 2))
    # Against the same estimator's own forward KL from the record, position by position.
    near, far = (pair_from(data, name).kl.estimate for name in ("base", "b"))
    assert near is not None
    assert far is not None
    found = excess(data, "base", "b")
    assert found.value == pytest.approx(far.sum() / near.sum(), rel=1e-12)
    exact = exact_kl(logits(0), logits(0.15, 2)).sum() / exact_kl(logits(0), logits(0.1, 1)).sum()
    assert found.value == pytest.approx(exact, rel=0.1)
    assert found.interval is not None
    assert found.interval.low < exact < found.interval.high


def test_noise_of_the_same_size_gives_one_and_twice_the_noise_four() -> None:
    data = audit(base=logits(0.1, 1), same=logits(0.1, 2), twice=logits(0.2, 3))
    for name, expected in (("same", 1.0), ("twice", 4.0)):
        found = excess(data, "base", name)
        assert found.interval is not None
        assert found.interval.low < expected < found.interval.high


def test_the_interval_is_of_groups() -> None:
    found = excess(audit(base=logits(0.1, 1), b=logits(0.15, 2)), "base", "b")
    assert found.interval is not None
    assert found.interval.method == "t"
    assert len(logits(0)) == 8 * LENGTH


def test_a_baseline_that_equals_the_record_is_no_denominator() -> None:
    data = audit(base=logits(0), b=logits(0.15, 2))
    found = excess(data, "base", "b")
    assert found.value is None
    assert "equals the record" in str(found.note)


def test_it_is_not_available_where_dtypes_are_unknown() -> None:
    data = audit(base=logits(0.1, 1), b=logits(0.1, 2))
    assert table_of(pair_from(data, "b", "base"))["kl.excess"].value is None
    data.infos["b"] = {}
    assert "unknown" in str(excess(data, "base", "b").note)


def test_tokens_the_candidate_makes_impossible_are_counted() -> None:
    data = audit(base=logits(0.1, 1), b=logits(0.1, 2))
    table = data.tables["b"]
    index = table.schema.get_field_index("support_logprobs")
    rows = table["support_logprobs"].to_pylist()
    rows[3][2] = -np.inf
    rows[9][0] = float("nan")
    column = table.schema.field(index)
    data.tables["b"] = table.set_column(index, column, [pa.array(rows, column.type)])
    pair = pair_from(data, "b", "base")
    metrics = MetricTable(pair, Resampler(len(pair.group_ids))).metrics(None, excess_refused=None)
    found = {metric.name: metric for metric in metrics}
    for name in ("kl.mean", "kl.reverse", "kl.excess"):
        assert found[name].unbounded == 2
        assert found[name].value is not None
