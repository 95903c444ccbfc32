from __future__ import annotations

import numpy as np
import pytest

from tests.cli.test_gates import audit, logits, repeats
from tests.diff.synthetic import FakeAudit, run_info
from trace_audit.diff.compare import Comparison, compare
from trace_audit.diff.floor import FloorBook
from trace_audit.diff.metric import Floor
from trace_audit.diff.source import AuditSource


def one(data: FakeAudit, baseline: str, candidate: str) -> Comparison:
    return compare(AuditSource(data), baseline, candidate)  # type: ignore[arg-type]


def value(data: FakeAudit, baseline: str, candidate: str, name: str) -> float:
    metric = one(data, baseline, candidate).summary.metric(name)
    assert metric is not None
    assert metric.value is not None
    return metric.value


def floor_of(comparison: Comparison, name: str) -> Floor | None:
    metric = comparison.summary.metric(name)
    assert metric is not None
    return metric.floor


def three_repeats() -> FakeAudit:
    data = audit(
        a=logits(0.05),
        a2=logits(0.05, 1),
        a3=logits(0.05, 2),
        b=logits(0.2, 9),
    )
    repeats(data, "a2", "a")
    repeats(data, "a3", "a")
    return data


@pytest.mark.parametrize("name", ["abs.mean", "kl.mean", "tme", "abs.p99"])
def test_a_floor_is_the_mean_over_pairs(name: str) -> None:
    data = three_repeats()
    pairs = [("a", "a2"), ("a", "a3"), ("a2", "a3")]
    # Each of the pairs alone, in an audit that calls nothing a repeat.
    plain = three_repeats()
    for run in ("a2", "a3"):
        del plain.infos[run]["repeat_of"]
    expected = np.mean([value(plain, *runs, name) for runs in pairs])
    floor = floor_of(one(data, "record", "a"), name)
    assert floor is not None
    assert floor.value == pytest.approx(expected, rel=1e-12)
    assert (floor.kind, floor.run, floor.pairs) == ("rerun", "a", 3)
    assert floor.interval is not None
    assert floor.interval.low < floor.value < floor.interval.high


def test_the_ratio_is_of_distances_from_no_difference() -> None:
    floor = floor_of(one(three_repeats(), "a", "b"), "tme")
    assert floor is not None
    assert floor.ratio == pytest.approx(
        (value(three_repeats(), "a", "b", "tme") - 1) / (floor.value - 1)
    )


def test_a_signed_metric_has_a_floor_of_sizes() -> None:
    data = three_repeats()
    pairs = [("a", "a2"), ("a", "a3"), ("a2", "a3")]
    plain = three_repeats()
    for run in ("a2", "a3"):
        del plain.infos[run]["repeat_of"]
    expected = np.mean([abs(value(plain, *runs, "delta.mean")) for runs in pairs])
    floor = floor_of(one(data, "record", "a"), "delta.mean")
    assert floor is not None
    assert floor.value == pytest.approx(expected)


def test_the_larger_of_two_sides_counts() -> None:
    data = audit(
        a=logits(0.05), a2=logits(0.05, 1), b=logits(0.05, 2), b2=logits(0.4, 3), c=logits(0.1, 4)
    )
    repeats(data, "a2", "a")
    repeats(data, "b2", "b")
    for runs in (("a", "b"), ("b", "a")):
        floor = floor_of(one(data, *runs), "abs.mean")
        assert floor is not None
        assert floor.run == "b"
    assert len(one(data, "a", "b").summary.floors) == 2


def test_equal_repeats_have_a_floor_of_exactly_zero() -> None:
    data = audit(a=logits(0.05), a2=logits(0.05))
    repeats(data, "a2", "a")
    comparison = one(data, "record", "a")
    floor = floor_of(comparison, "abs.mean")
    assert floor is not None
    assert (floor.value, floor.ratio) == (0.0, None)
    tme = floor_of(comparison, "tme")
    assert tme is not None
    assert tme.value == 1.0
    assert comparison.summary.floors[0].bitwise
    assert comparison.summary.floors[0].unequal_share == 0.0


def test_a_property_of_one_run_has_no_floor() -> None:
    comparison = one(three_repeats(), "record", "a")
    for name in ("ppl.baseline", "ties.candidate", "flip.near_tie"):
        assert floor_of(comparison, name) is None


def test_a_pair_is_not_its_own_floor() -> None:
    data = audit(a=logits(0.05), a2=logits(0.3, 1))
    repeats(data, "a2", "a")
    assert one(data, "a", "a2").summary.floors == ()
    assert floor_of(one(data, "record", "a2"), "abs.mean") is not None


def test_a_batch_repeat_is_a_floor_of_its_own() -> None:
    data = audit(a=logits(0.05), a2=logits(0.05), m=logits(0.05, 3))
    repeats(data, "a2", "a")
    repeats(data, "m", "a", "batch")
    comparison = one(data, "record", "a")
    assert [floor.kind for floor in comparison.summary.floors] == ["rerun", "batch"]
    floor = floor_of(comparison, "abs.mean")
    assert floor is not None
    assert floor.kind == "batch"


def test_a_batch_repeat_differs_in_its_batch_order_and_nothing_else() -> None:
    data = audit(a=logits(0.05), m=logits(0.05, 3), n=logits(0.05, 4))
    for name, changed in (("m", {}), ("n", {"block_size": 32})):
        data.infos[name] = run_info(name, dtype="bfloat16", batch_order_seed=7, **changed)
        repeats(data, name, "a", "batch")
    (floor,) = one(data, "record", "a").summary.floors
    assert floor.runs == ("a", "m")
    assert floor.left_out == ("n: its configuration differs (engine.block_size)",)


def test_another_batch_order_is_no_rerun() -> None:
    data = audit(a=logits(0.05), m=logits(0.05, 3))
    data.infos["m"] = run_info("m", dtype="bfloat16", batch_order_seed=7)
    repeats(data, "m", "a", "rerun")
    (floor,) = one(data, "record", "a").summary.floors
    assert floor.left_out == ("m: its configuration differs (engine.batch_order_seed)",)


@pytest.mark.parametrize(
    ("key", "changed", "said"),
    [
        ("environment_fingerprint", "0" * 64, "environment"),
        ("model_fingerprint", "0" * 64, "checkpoint"),
        ("resolved_config", {"engine": {"dtype": "float16"}}, "engine.dtype"),
    ],
)
def test_what_only_says_it_repeats_is_left_out_and_named(
    key: str, changed: object, said: str
) -> None:
    data = audit(a=logits(0.05), a2=logits(0.3, 1))
    repeats(data, "a2", "a")
    data.infos["a2"][key] = changed
    (floor,) = one(data, "record", "a").summary.floors
    assert floor.pairs == 0
    assert "a2" in floor.left_out[0]
    assert said in floor.left_out[0]


def test_a_repeat_that_cannot_be_compared_is_left_out_and_named() -> None:
    data = three_repeats()
    data.tables["a3"] = data.tables["a3"].slice(1)
    (floor,) = one(data, "record", "a").summary.floors
    assert floor.pairs == 1
    assert "lacks 1 of" in floor.left_out[0]


def test_many_repeats_are_compared_each_with_the_next() -> None:
    runs = {"a": logits(0.05)} | {f"a{i}": logits(0.05, i) for i in range(1, 8)}
    data = audit(**runs)
    for i in range(1, 8):
        repeats(data, f"a{i}", "a")
    (floor,) = one(data, "record", "a").summary.floors
    assert (len(floor.runs), floor.pairs) == (8, 7)


def test_hard_flips_are_held_against_the_repeats_gap_change() -> None:
    data = audit(a=logits(0.4), a2=logits(0.4, 1), b=logits(0.02, 2))
    repeats(data, "a2", "a")
    book = FloorBook(AuditSource(data))  # type: ignore[arg-type]
    (floor,) = book.floors("a", "b")
    changes = one(data, "a", "a2").changes
    assert changes is not None
    assert floor.gap_change == pytest.approx(np.quantile(changes.gap_change, 0.99))
    widened = one(data, "a", "b").changes
    assert widened is not None
    assert widened.threshold is not None
    assert (widened.threshold >= floor.gap_change - 1e-12).all()
