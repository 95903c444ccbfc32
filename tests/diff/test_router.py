"""Router agreement, on numbers worked out by hand."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest

from tests.diff.synthetic import FakeAudit, make_sequences, run_info, run_table
from trace_audit.diff.compare import compare
from trace_audit.diff.gate import judge
from trace_audit.diff.gate_expression import parse_gate
from trace_audit.diff.metric import Metric
from trace_audit.diff.router_totals import num_lost
from trace_audit.diff.save import diff_tables
from trace_audit.diff.source import AuditSource
from trace_audit.diff.summary import PairSummary
from trace_audit.diff.verdict import Gating
from trace_audit.storage.schema import OPTIONAL_FIELDS

ROUTING = {"layers": [1, 3], "num_experts": 8, "reason": None}
# Two sequences of three tokens; two layers that choose two experts each.
A = [
    [[0, 1], [2, 3]],
    [[0, 1], [2, 3]],
    [[4, 5], [6, 7]],
    [[0, 2], [1, 3]],
    [[0, 2], [1, 3]],
    [[0, 2], [1, 3]],
]
B = [
    [[0, 1], [2, 3]],  # the same
    [[0, 1], [2, 4]],  # one of the two in layer 3
    [[0, 1], [2, 3]],  # both in both layers
    [[0, 2], [1, 3]],
    [[0, 2], [1, 3]],
    [[0, 2], [3, 4]],  # 1 went, 3 stayed
]
DELTAS = np.array([0.1, -0.4, 0.8, 0.0, 0.2, -0.1])


def with_experts(table: pa.Table, choices: Any) -> pa.Table:
    (field,) = OPTIONAL_FIELDS
    lists = [None if row is None else np.ravel(row).tolist() for row in choices]
    return table.append_column(field, pa.array(lists, field.type))


def audit_of(
    left: Any = A, right: Any = B, *, routing: Any = ROUTING, infos: dict[str, Any] | None = None
) -> FakeAudit:
    """The run "b" against "record"; infos replace `routing` of one of them."""
    sequences = make_sequences(np.zeros((2, 3), dtype=np.int64))
    logprob = np.full(6, -1.0)
    hashes = {"logits_hash": np.arange(6)}
    tables = {
        "record": run_table(sequences, {"logprob": logprob, **hashes}),
        "b": run_table(sequences, {"logprob": logprob + DELTAS, **hashes}),
    }
    for name, choices in (("record", left), ("b", right)):
        if choices is not None:
            tables[name] = with_experts(tables[name], choices)
    return FakeAudit(
        sequences=sequences,
        tables=tables,
        infos={n: run_info(n) | {"routing": (infos or {}).get(n, routing)} for n in tables},
    )


def compared(audit: FakeAudit) -> Any:
    return compare(AuditSource(cast(Any, audit)), "record", "b")


def summary_of(audit: FakeAudit) -> PairSummary:
    return cast(PairSummary, compared(audit).summary)


def metrics_of(summary: PairSummary) -> dict[str, Metric]:
    return {m.name: m for m in summary.metrics if m.section == "router"}


def test_by_hand() -> None:
    summary = summary_of(audit_of())
    value = {name: metric.value for name, metric in metrics_of(summary).items()}
    # 4 of 12 calls: layer 3 of token 1, both layers of token 2, layer 3 of token 5.
    assert value["router.disagreement"] == pytest.approx(4 / 12)
    # 1 + 4 + 1 of 24 chosen experts.
    assert value["router.replaced"] == pytest.approx(6 / 24)
    assert value["router.tokens"] == pytest.approx(3 / 6)
    assert value["router.abs_changed"] == pytest.approx((0.4 + 0.8 + 0.1) / 3, rel=1e-6)
    assert value["router.abs_same"] == pytest.approx((0.1 + 0.0 + 0.2) / 3, rel=1e-6)
    assert value["router.abs_share"] == pytest.approx(1.3 / 1.6, rel=1e-6)


def test_layers_are_named_as_the_model_numbers_them() -> None:
    router = summary_of(audit_of()).router
    assert router is not None
    assert (router.calls, router.changed, router.tokens) == (12, 4, 3)
    assert (router.num_chosen, router.num_experts) == (2, 8)
    assert [(r.layer, r.share) for r in router.layers] == [(1, 1 / 6), (3, 0.5)]
    assert router.first_layer == 1
    later = [[[0, 1], b[1]] for b in B]
    same = [[[0, 1], a[1]] for a in A]
    behind = summary_of(audit_of(same, later)).router
    assert behind is not None
    assert behind.first_layer == 3
    assert behind.layers[0].share == 0
    assert behind.layers[0].interval is not None
    assert behind.layers[0].interval.high > 0  # never [0, 0]


def test_intervals_are_of_tokens_clustered_by_sequence() -> None:
    """The mean over tokens of 0, 1/2, 1 and 0, 0, 1/2; few events, so the binomial rule on them."""
    summary = summary_of(audit_of())
    metrics = metrics_of(summary)
    calls = metrics["router.disagreement"]
    assert calls.interval is not None
    assert calls.interval.method == "clopper-pearson"
    # Group sums 1.5 and 0.5 around 3 x 1/3: the design effect is at least 1, so N_eff at most 6.
    spread = 2 / 1 * (0.5**2 + 0.5**2) / 6**2
    independent = np.var([0, 0.5, 1, 0, 0, 0.5]) / 6
    assert calls.effective_n == pytest.approx(6 / max(1.0, spread / independent))
    changed = metrics["router.abs_changed"]
    assert changed.interval is not None
    assert changed.interval.method == "t"
    # Residuals of the two sequences: 1.2 - 2 m and 0.1 - m around m = 1.3 / 3.
    mean = 1.3 / 3
    error = np.sqrt(2 * ((1.2 - 2 * mean) ** 2 + (0.1 - mean) ** 2)) / 3
    assert changed.interval.high == pytest.approx(mean + 12.7062 * error, rel=1e-4)
    assert changed.interval.low == 0


def test_deltas_are_split_by_how_many_layers_changed() -> None:
    structure = summary_of(audit_of()).structure
    assert structure is not None
    found = [(s.label, s.tokens, round(s.mean_abs_delta, 6)) for s in structure.routers]
    assert found == [("0", 3, 0.1), ("1", 2, 0.25), ("2", 1, 0.8)]


def test_a_token_tells_how_many_layers_changed() -> None:
    comparison = compared(audit_of())
    assert comparison.summary.worst[0].routers_changed == 2
    assert comparison.summary.worst[1].routers_changed == 1
    saved = pa.concat_tables(diff_tables(comparison))
    assert saved["routers_changed"].to_pylist() == [0, 1, 2, 0, 0, 1]


def test_a_non_finite_token_has_choices_and_no_delta() -> None:
    audit = audit_of()
    logprob = audit.tables["b"]["logprob"].to_pylist()
    logprob[2] = float("nan")
    index = audit.tables["b"].schema.get_field_index("logprob")
    field = audit.tables["b"].schema.field("logprob")
    audit.tables["b"] = audit.tables["b"].set_column(index, field, pa.array(logprob, pa.float32()))
    metrics = metrics_of(summary_of(audit))
    assert metrics["router.disagreement"].value == pytest.approx(4 / 12)  # its choices are known
    assert metrics["router.abs_changed"].value == pytest.approx((0.4 + 0.1) / 2, rel=1e-6)


def test_the_same_experts_everywhere() -> None:
    summary = summary_of(audit_of(A, A))
    metrics = metrics_of(summary)
    assert metrics["router.disagreement"].value == 0
    interval = metrics["router.disagreement"].interval
    assert interval is not None
    assert interval.high > 0
    assert metrics["router.abs_changed"].value is None
    assert "no token" in str(metrics["router.abs_changed"].note)
    assert metrics["router.abs_same"].value == pytest.approx(1.6 / 6, rel=1e-6)
    assert metrics["router.abs_share"].value == 0
    assert summary.router is not None
    assert summary.router.first_layer is None


def test_a_dense_pair_has_no_row_and_no_gate() -> None:
    summary = summary_of(audit_of(None, None, routing=None))
    assert metrics_of(summary) == {}
    assert summary.router is None
    assert summary.structure is not None
    assert summary.structure.routers == ()
    verdict = judge(summary, Gating(profile=None, gates=(parse_gate("router.disagreement > 1%"),)))
    assert verdict.outcome == "invalid"
    assert verdict.results[0].reason == "neither run's model has a router"


def test_a_gate_on_routers_decides() -> None:
    summary = summary_of(audit_of())
    verdict = judge(summary, Gating(profile=None, gates=(parse_gate("router.disagreement > 99%"),)))
    assert verdict.outcome == "pass"


@pytest.mark.parametrize(
    ("audit", "reason"),
    [
        (audit_of(right=None), "run 'b' stores no expert choices"),
        (audit_of(right=None, infos={"b": None}), "run 'b' stores no expert choices"),
        (
            audit_of(None, infos={"record": {**ROUTING, "reason": "they are not told"}}),
            "run 'record' stores no expert choices: they are not told",
        ),
        (audit_of(infos={"b": {**ROUTING, "layers": [0, 3]}}), "do not have the same routers"),
        (audit_of(infos={"b": {**ROUTING, "num_experts": 16}}), "do not have the same routers"),
        (audit_of(right=[[[0], [2]]] * 6), "do not choose as many experts"),
        (audit_of(right=[*B[:5], None]), "a run has rows without expert choices"),
    ],
)
def test_what_cannot_be_compared_says_why(audit: FakeAudit, reason: str) -> None:
    summary = summary_of(audit)
    metrics = metrics_of(summary)
    assert len(metrics) == 6
    assert {metric.value for metric in metrics.values()} == {None}
    assert all(reason in str(metric.note) for metric in metrics.values())
    assert summary.router is None


def test_a_run_from_before_the_column_is_told() -> None:
    audit = audit_of(right=None)
    del audit.infos["b"]["routing"]
    audit.infos["b"]["backends"]["experts"] = "grouped_mm"
    note = str(metrics_of(summary_of(audit))["router.disagreement"].note)
    assert note == (
        "run 'b' stores no expert choices: it is older than the recording of expert choices"
    )
    # Both from before it, of a dense model.
    old = audit_of(None, None)
    for info in old.infos.values():
        del info["routing"]
    assert metrics_of(summary_of(old)) == {}


def test_ids_that_another_set_lacks() -> None:
    a = np.array([[0, 1, 2], [0, 1, 2], [3, 4, 5]], dtype=np.uint16)
    b = np.array([[0, 1, 2], [1, 2, 3], [0, 1, 2]], dtype=np.uint16)
    assert num_lost(a, b).tolist() == [0, 1, 3]
