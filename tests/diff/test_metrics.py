from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.diff.synthetic import (
    FakeAudit,
    Logits,
    index_of,
    log_softmax,
    logprob_pair,
    make_sequences,
    model_audit,
    run_rows,
    run_table,
)
from trace_audit.diff.align import AlignedPair, align
from trace_audit.diff.bootstrap import Resampler
from trace_audit.diff.catalog import CATALOG
from trace_audit.diff.catalog_rl import RL
from trace_audit.diff.flips import top_changes
from trace_audit.diff.kl_metrics import kl_coverage
from trace_audit.diff.metrics import MetricTable
from trace_audit.diff.summary import Metric
from trace_audit.storage.schema import TOKENS_SCHEMA

WITHOUT_ROUTERS = [name for name, info in CATALOG.items() if info.section != "router"]


def table_of(pair: AlignedPair) -> dict[str, Metric]:
    table = MetricTable(pair, Resampler(len(pair.group_ids)))
    return {m.name: m for m in table.metrics(top_changes(pair))}


def pair_from(audit: FakeAudit, candidate: str, baseline: str = "record") -> AlignedPair:
    trace = index_of(audit.sequences)
    runs = {
        name: run_rows(trace, name, table, logit_dtype="float32")
        for name, table in audit.tables.items()
    }
    return align(trace, runs[baseline], runs[candidate], record=runs.get("record"))


def value(metrics: Mapping[str, Metric], name: str) -> float:
    found = metrics[name].value
    assert found is not None, metrics[name].note
    return found


# Two sequences of two tokens. Deltas: ln 1.25, -ln 2, 0, ln 1.05.
BASELINE = np.array([[0.4, 0.5], [0.8, 0.2]])
CANDIDATE = np.array([[0.5, 0.25], [0.8, 0.21]])
DELTAS = [math.log(1.25), -math.log(2), 0.0, math.log(1.05)]


@pytest.fixture(scope="module")
def hand() -> dict[str, Metric]:
    return table_of(logprob_pair(np.log(BASELINE), np.log(CANDIDATE)))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("delta.mean", sum(DELTAS) / 4),
        ("abs.mean", (math.log(1.25) + math.log(2) + math.log(1.05)) / 4),
        ("delta.rms", math.sqrt(sum(d * d for d in DELTAS) / 4)),
        ("abs.p50", (math.log(1.05) + math.log(1.25)) / 2),
        ("abs.p90", math.log(1.25) + 0.7 * (math.log(2) - math.log(1.25))),
        ("abs.p99", math.log(1.25) + 0.97 * (math.log(2) - math.log(1.25))),
        ("abs.p99_9", math.log(1.25) + 0.997 * (math.log(2) - math.log(1.25))),
        ("abs.max", math.log(2)),
        ("delta.equal", 0.25),
        ("tme", (1.25 + 2 + 1 + 1.05) / 4),
        ("ratio.outside", 0.5),
        ("dp.rms", math.sqrt((0.1**2 + 0.25**2 + 0.01**2) / 4)),
        ("dp.p50", 0.055),
        ("dp.p99", 0.1 + 0.97 * 0.15),
        ("ppl.baseline", (0.4 * 0.5 * 0.8 * 0.2) ** -0.25),
        ("ppl.candidate", (0.5 * 0.25 * 0.8 * 0.21) ** -0.25),
        ("ppl.ratio", math.exp(-sum(DELTAS) / 4)),
    ],
)
def test_hand_computed(hand: dict[str, Metric], name: str, expected: float) -> None:
    assert value(hand, name) == pytest.approx(expected, rel=1e-6)


def test_perplexity_ratio_is_candidate_over_baseline(hand: dict[str, Metric]) -> None:
    ratio = value(hand, "ppl.candidate") / value(hand, "ppl.baseline")
    assert value(hand, "ppl.ratio") == pytest.approx(ratio, rel=1e-9)


def test_intervals_of_transformed_metrics_move_with_their_values(hand: dict[str, Metric]) -> None:
    for name in ("delta.rms", "dp.rms", "ppl.baseline", "ppl.ratio"):
        interval = hand[name].interval
        assert interval is not None
        assert interval.low <= value(hand, name) <= interval.high
    ratio, bias = hand["ppl.ratio"].interval, hand["delta.mean"].interval
    assert ratio is not None
    assert bias is not None
    assert ratio.low == pytest.approx(math.exp(-bias.high))
    assert ratio.high == pytest.approx(math.exp(-bias.low))


def test_absent_columns_are_not_available_with_a_reason(hand: dict[str, Metric]) -> None:
    for name in (
        "kl.mean",
        "kl.lower",
        "rows.unequal",
        "lse.drift",
        "rank.changed",
        "ties.baseline",
        "flip.all",
        "top1.disagreement",
    ):
        assert hand[name].value is None
        assert hand[name].note, name
        assert hand[name].interval is None


def test_every_metric_of_the_catalog_is_in_every_table_but_those_of_routers(
    hand: dict[str, Metric],
) -> None:
    assert list(hand) == WITHOUT_ROUTERS


def test_zero_mean_with_a_wide_spread_is_visible() -> None:
    # 8 % of ratios outside [0.9, 1.1] around a mean of exactly zero.
    delta = np.zeros((10, 100))
    delta[:, :4], delta[:, 4:8] = 0.25, -0.25
    metrics = table_of(logprob_pair(np.full(delta.shape, -1.0), -1.0 + delta))
    assert value(metrics, "delta.mean") == 0
    assert value(metrics, "ratio.outside") == pytest.approx(0.08)
    assert value(metrics, "abs.mean") == pytest.approx(0.02)


def test_rare_outliers_under_a_tiny_mean_are_visible() -> None:
    delta = np.full((10, 1000), 1e-4)
    delta[3, 512] = -12.0
    metrics = table_of(logprob_pair(np.full(delta.shape, -1.0), -1.0 + delta))
    assert value(metrics, "abs.mean") < 0.0015
    assert value(metrics, "abs.max") == pytest.approx(12.0, rel=1e-6)


def test_sixteen_bit_storage_would_be_seen() -> None:
    # A difference far below half precision's spacing at -5 nats survives storage and arithmetic.
    metrics = table_of(logprob_pair(np.full((2, 8), -5.0), np.full((2, 8), -5.0 + 1e-5)))
    assert value(metrics, "abs.mean") == pytest.approx(1e-5, rel=0.05)


def columns(**lists: Any) -> dict[str, Any]:
    logprob = np.full(4, -1.0)
    return {"logprob": logprob, **{k: np.array(v) for k, v in lists.items()}}


def simple_pair(a: dict[str, Any], b: dict[str, Any]) -> AlignedPair:
    sequences = make_sequences(np.zeros((2, 2), dtype=np.int64))
    trace = index_of(sequences)
    runs = [run_rows(trace, n, run_table(sequences, c)) for n, c in (("record", a), ("b", b))]
    return align(trace, *runs)


def test_drifts_ranks_and_ties() -> None:
    a = columns(logsumexp=[1.0, 2, 3, 4], entropy=[1.0, 1, 1, 1], rank=[1, 1, 2, 1])
    b = columns(logsumexp=[1.5, 2.5, 3, 4], entropy=[1.0, 1, 1, 0], rank=[1, 2, 2, 1])
    a["tie_count"], b["tie_count"] = np.array([0, 1, 0, 0]), np.array([0, 1, 3, 0])
    metrics = table_of(simple_pair(a, b))
    assert value(metrics, "lse.drift") == 0.25
    assert value(metrics, "entropy.drift") == -0.25
    assert value(metrics, "rank.changed") == 0.25
    assert value(metrics, "ties.baseline") == 0.25
    assert value(metrics, "ties.candidate") == 0.5


def test_a_row_with_a_null_rank_is_left_out_of_rank_changes() -> None:
    a = columns(rank=[1, 1, 1, 1])
    b = columns()
    b["rank"] = pa.array([1, None, 2, 1], pa.int32())
    b["logprob"] = np.array([-1.0, np.nan, -1.0, -1.0])
    metrics = table_of(simple_pair(a, b))
    assert value(metrics, "rank.changed") == pytest.approx(1 / 3)
    assert value(metrics, "abs.mean") == 0


def test_all_non_finite_candidates_give_no_value_at_all() -> None:
    metrics = table_of(logprob_pair([-1.0, -2.0], [np.nan, -np.inf]))
    assert {m.value for m in metrics.values()} == {None}
    assert list(metrics) == WITHOUT_ROUTERS


def test_equal_logprobs_of_unequal_logits_are_not_bit_equal() -> None:
    a, b = columns(logits_hash=[1, 2, 3, 4]), columns(logits_hash=[1, 2, 3, 5])
    pair = simple_pair(a, b)
    unequal = pair.unequal
    assert unequal is not None
    assert unequal.tolist() == [False, False, False, True]
    assert value(table_of(pair), "delta.equal") == 1.0
    assert value(table_of(pair), "rows.unequal") == 0.25


def test_a_missing_hash_is_never_called_bit_equal() -> None:
    a, b = columns(logits_hash=[1, 2, 3, 4]), columns()
    b["logits_hash"] = pa.array([1, 2, None, 4], pa.int64())
    assert simple_pair(a, b).unequal is None


# --- KL and the estimators that need sampled tokens ---


def runs(sigma: float = 0.2, rows: int = 240) -> dict[str, Logits]:
    generator = np.random.default_rng(0)
    record = generator.normal(0, 2.5, (rows, 80))
    return {
        "record": record,
        "base": record + generator.normal(0, 0.05, record.shape),
        "b": record + generator.normal(0, sigma, record.shape),
    }


def exact(x: Logits, y: Logits) -> float:
    lx, ly = log_softmax(x), log_softmax(y)
    return float((np.exp(lx) * (lx - ly)).sum(axis=1).mean())


@pytest.mark.parametrize("baseline", ["record", "base"])
def test_kl_is_near_the_exact_value_in_both_directions(baseline: str) -> None:
    logits = runs()
    audit = model_audit(logits, length=24)
    metrics = table_of(pair_from(audit, "b", baseline))
    forward = exact(logits[baseline], logits["b"])
    assert value(metrics, "kl.mean") == pytest.approx(forward, rel=0.06)
    reverse = exact(logits["b"], logits[baseline])
    assert value(metrics, "kl.reverse") == pytest.approx(reverse, rel=0.06)
    assert 0 < value(metrics, "kl.lower") < forward


def test_kl_needs_the_record_run() -> None:
    audit = model_audit(runs(), length=24)
    del audit.tables["record"]
    metrics = table_of(pair_from(audit, "b", "base"))
    assert metrics["kl.mean"].value is None


def test_kl_positions_without_a_support_are_counted() -> None:
    audit = model_audit(runs(), length=24)
    audit.sequences[2].support_token_ids[:, 20:] = -1
    pair = pair_from(audit, "b")
    coverage = kl_coverage(pair)
    assert coverage is not None
    assert (coverage.used, coverage.no_support) == (216, 24)
    assert table_of(pair)["kl.mean"].value is not None


def test_an_infinite_kl_is_counted_and_not_averaged() -> None:
    audit = model_audit(runs(), length=24)
    lists = audit.tables["b"]["support_logprobs"].to_pylist()
    lists[7][0] = -math.inf
    position = TOKENS_SCHEMA.get_field_index("support_logprobs")
    audit.tables["b"] = audit.tables["b"].set_column(
        position, TOKENS_SCHEMA.field(position), pa.array(lists, pa.list_(pa.float32()))
    )
    metrics = table_of(pair_from(audit, "b"))
    assert math.isfinite(value(metrics, "kl.mean"))
    assert metrics["kl.mean"].note == "infinite at 1 tokens, which are left out"


def test_reverse_kl_of_a_gross_fault_is_printed_as_a_bound() -> None:
    record = np.zeros((40, 60))
    record[:, :20] = 9.0
    audit = model_audit({"record": record, "b": np.zeros_like(record)}, length=10)
    metrics = table_of(pair_from(audit, "b"))
    assert metrics["kl.reverse"].at_least
    assert metrics["kl.reverse"].value == metrics["kl.reverse_lower"].value
    assert not metrics["kl.mean"].at_least


def test_what_needs_a_sample_is_not_printed_on_a_greedy_trace() -> None:
    metrics = table_of(pair_from(model_audit(runs(), length=24), "b"))
    for name in ("kl.k1", "kl.k2", "kl.k3", *RL):
        assert metrics[name].value is None
        assert "greedy" in str(metrics[name].note)


def sampled(temperature: float | None, baseline: str = "record") -> dict[str, Metric]:
    sequences = make_sequences(np.zeros(BASELINE.shape, dtype=np.int64), source="sampled")
    trace = index_of(sequences, temperature=temperature)
    a, b = (
        run_rows(trace, name, run_table(sequences, {"logprob": np.log(p).ravel()}))
        for name, p in ((baseline, BASELINE), ("b", CANDIDATE))
    )
    return table_of(align(trace, a, b))


def test_k1_and_k3_on_a_sampled_trace() -> None:
    metrics = sampled(1.0)
    assert value(metrics, "kl.k1") == pytest.approx(-sum(DELTAS) / 4)
    # exp(delta) - 1 - delta with delta = candidate minus baseline; swapped, it would be 0.0855.
    expected = sum(math.exp(d) - 1 - d for d in DELTAS) / 4
    assert value(metrics, "kl.k3") == pytest.approx(expected, rel=1e-5)
    assert value(metrics, "kl.k2") == pytest.approx(sum(d * d for d in DELTAS) / 8)
    swapped = sum(math.exp(-d) - 1 + d for d in DELTAS) / 4
    assert abs(expected - swapped) > 0.01


@pytest.mark.parametrize("arguments", [(0.7, "record"), (None, "record"), (1.0, "other")])
def test_k1_and_k3_need_samples_of_the_baseline_at_temperature_one(
    arguments: tuple[float | None, str],
) -> None:
    metrics = sampled(*arguments)
    for name in ("kl.k1", "kl.k2", "kl.k3", *RL):
        assert metrics[name].value is None
        assert metrics[name].note


def test_flip_shares_and_excess() -> None:
    generator = np.random.default_rng(1)
    record = generator.normal(0, 2, (2000, 40))
    audit = model_audit(
        {"record": record, "b": record + generator.normal(0, 0.1, record.shape)}, length=100
    )
    pair = pair_from(audit, "b")
    changes = top_changes(pair)
    metrics = table_of(pair)
    assert changes is not None
    assert changes.expected is not None
    assert value(metrics, "flip.all") == changes.flip.mean()
    assert value(metrics, "top1.disagreement") == (changes.flip | changes.tie_change).mean()
    excess = changes.flip.sum() / changes.expected.sum()
    assert value(metrics, "flip.excess") == pytest.approx(excess)
    assert excess == pytest.approx(1.0, abs=0.35)
    interval = metrics["flip.excess"].interval
    assert interval is not None
    assert interval.method == "bootstrap"


def test_excess_is_not_shown_under_five_expected_flips() -> None:
    record = np.random.default_rng(1).normal(0, 2, (200, 40))
    audit = model_audit({"record": record, "b": record + 1e-4 * np.sin(record)}, length=100)
    excess = table_of(pair_from(audit, "b"))["flip.excess"]
    assert excess.value is None
    assert "expected flips" in str(excess.note)


def test_scarce_tail_quantile_says_so() -> None:
    metrics = table_of(logprob_pair(np.full((4, 8), -1.0), np.full((4, 8), -1.1)))
    assert metrics["abs.p99_9"].note == "under 10,000 effective tokens"
