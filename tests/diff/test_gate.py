from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.report.samples import bitwise, identity, pair, report
from trace_audit.diff.catalog import metric
from trace_audit.diff.estimators import Estimate
from trace_audit.diff.gate import exit_code, judge, worst
from trace_audit.diff.metric import Floor, Interval
from trace_audit.diff.summary import Expectation, InvalidPair, PairSummary
from trace_audit.diff.verdict import FloorSummary, Gate, GateResult, Gating, Verdict


def measured(
    name: str = "kl.mean",
    value: float | None = 0.004,
    low: float = 0.003,
    high: float = 0.005,
    floor: float | None = None,
    **changed: Any,
) -> PairSummary:
    """A pair whose table is one metric, from 8 groups."""
    bounds = Interval(low=low, high=high, method="t")
    found = metric(name, Estimate(value=0.0 if value is None else value, interval=bounds))
    if floor is not None:
        one = Floor(value=floor, interval=None, kind="rerun", run="x", pairs=1)
        found = replace(found, floor=one)
    return pair(metrics=(replace(found, value=value, **changed),))


def gating(*gates: Gate, **options: Any) -> Gating:
    return Gating(profile=None, gates=gates, **options)


def over(bound: float | None, name: str = "kl.mean", **options: Any) -> Gating:
    return gating(Gate(metric=name, bound=bound, **options))


def result(verdict: Verdict) -> GateResult:
    (only,) = verdict.results
    return only


@pytest.mark.parametrize(
    ("bound", "outcome"),
    [
        (0.006, "pass"),
        (0.005, "pass"),
        (0.0049, "inconclusive"),
        (0.003, "inconclusive"),
        (0.0029, "fail"),
    ],
)
def test_the_bounds_of_the_interval_decide(bound: float, outcome: str) -> None:
    # [0.003, 0.005]: the upper bound at the threshold passes, the lower bound at it is open.
    verdict = judge(measured(), over(bound))
    assert verdict.outcome == outcome
    assert result(verdict).passing_bound == 0.005


def test_a_census_is_decided_on_the_count() -> None:
    gates = over(0.0, "rows.unequal")
    one = measured("rows.unequal", 1 / 1024, 0.0, 0.004)
    assert judge(one, gates).outcome == "fail"
    assert result(judge(one, gates)).passing_bound == 1 / 1024
    # A share with another bound is no census.
    assert judge(one, over(0.01, "rows.unequal")).outcome == "pass"


def test_a_bitwise_pair_passes_every_gate() -> None:
    for name in ("rows.unequal", "kl.mean", "kl.excess", "tme"):
        verdict = judge(bitwise(), over(0.0, name))
        assert (verdict.outcome, verdict.passed) == ("pass", "BITWISE")


def test_what_a_run_cannot_give_is_invalid() -> None:
    absent = judge(measured(value=None, note="a run has no support"), over(1.0))
    assert absent.outcome == "invalid"
    assert result(absent).reason == "a run has no support"
    bound = judge(measured(not_gated="only a lower bound"), over(1.0))
    assert (bound.outcome, result(bound).reason) == ("invalid", "only a lower bound")


def test_infinite_kl_fails_whatever_the_finite_part_is() -> None:
    verdict = judge(measured(unbounded=3), over(1.0))
    assert verdict.outcome == "fail"
    assert "3 tokens" in str(result(verdict).reason)


def test_a_fault_fails_whatever_the_bounds_say() -> None:
    owed = Expectation(keys=(), reason="the configurations are equal", differing_rows=1)
    verdict = judge(replace(measured(), expected=owed), over(1.0))
    assert (verdict.outcome, verdict.passed) == ("fail", None)
    assert verdict.reason == "nothing between the two runs may change a bit, and rows differ"
    equal = judge(replace(measured(), expected=replace(owed, differing_rows=0)), over(1.0))
    assert equal.outcome == "pass"


def test_a_non_finite_candidate_fails_even_where_its_other_rows_pass() -> None:
    verdict = judge(replace(measured(), non_finite=1), over(1.0))
    assert (verdict.outcome, result(verdict).outcome) == ("fail", "pass")
    assert verdict.reason is not None
    everywhere = replace(measured(value=None, note="all non-finite"), non_finite=1024)
    assert judge(everywhere, over(1.0)).outcome == "fail"


def test_one_group_is_inconclusive() -> None:
    verdict = judge(measured(interval=None), over(1.0))
    assert verdict.outcome == "inconclusive"
    assert "one group" in str(result(verdict).reason)


def test_the_threshold_is_the_larger_of_bound_and_floors() -> None:
    three = {"floor_factor": 3.0}
    raised = result(judge(measured(floor=0.002), over(0.004, **three)))
    assert (raised.threshold, raised.outcome) == (pytest.approx(0.006), "pass")
    assert not raised.floor_over_bound
    small = result(judge(measured(floor=0.001), over(0.004, **three)))
    assert (small.threshold, small.outcome) == (0.004, "inconclusive")
    # What the user wrote is the threshold, floor or no floor.
    given = result(judge(measured(floor=0.002), over(0.004)))
    assert given.threshold == 0.004
    only = result(judge(measured(floor=0.001), over(None, **three)))
    assert only.threshold == pytest.approx(0.003)


def test_a_floor_over_the_bound_is_told() -> None:
    assert result(judge(measured(floor=0.005), over(0.004, floor_factor=3.0))).floor_over_bound


def test_floors_count_from_where_nothing_differs() -> None:
    # A TME floor of 1.002 is 0.002 away from 1: three of them are 1.006, not 3.006.
    found = measured("tme", 1.004, 1.003, 1.005, floor=1.002)
    threshold = result(judge(found, over(1.001, "tme", floor_factor=3.0))).threshold
    assert threshold == pytest.approx(1.006)


def test_within_floor_is_told_from_within_bound() -> None:
    three = {"floor_factor": 3.0}
    assert judge(measured(floor=0.002), over(0.1, **three)).passed == "WITHIN-FLOOR"
    assert judge(measured(floor=0.001), over(0.1, **three)).passed == "WITHIN-BOUND"
    assert judge(measured(), over(0.1, **three)).passed == "WITHIN-BOUND"


def test_a_floor_can_be_required() -> None:
    assert judge(measured(), over(1.0)).outcome == "pass"
    strict = replace(over(1.0), requires_floor=True)
    assert judge(measured(), strict).outcome == "invalid"
    assert judge(measured(floor=0.001), strict).outcome == "pass"
    assert judge(bitwise(), strict).outcome == "invalid"
    floor = FloorSummary(
        run="x", kind="rerun", runs=("x", "y"), pairs=1, bitwise=True, unequal_share=0.0
    )
    assert judge(replace(bitwise(), floors=(floor,)), strict).outcome == "pass"
    left_out = replace(floor, pairs=0, bitwise=False, left_out=("y: its environment differs",))
    assert judge(replace(bitwise(), floors=(left_out,)), strict).outcome == "invalid"


def test_a_floor_factor_without_a_floor_is_invalid() -> None:
    assert judge(measured(), over(None, floor_factor=3.0)).outcome == "invalid"


def test_a_watched_gate_is_no_part_of_the_verdict() -> None:
    watched = Gate(metric="kl.mean", bound=0.001, watch=True)
    verdict = judge(measured(), gating(Gate(metric="kl.mean", bound=1.0), watched))
    assert verdict.outcome == "pass"
    assert [one.outcome for one in verdict.results] == ["pass", "fail"]


@pytest.mark.parametrize(("key", "bound"), [("kv_cache_dtype", 4e-3), ("dtype", 1e-3)])
def test_an_fp8_format_has_its_own_bound(key: str, bound: float) -> None:
    value = "fp8_e4m3" if key == "kv_cache_dtype" else "bfloat16"
    found = replace(measured(), candidate=identity("b", **{key: value}))
    assert result(judge(found, over(1e-3, fp8_bound=4e-3))).bound == bound


def test_invalid_goes_before_fail_before_inconclusive_before_pass() -> None:
    assert worst(["pass", "inconclusive", "fail", "invalid"]) == "invalid"
    assert worst(["pass", "inconclusive", "fail"]) == "fail"
    assert worst(["pass", "inconclusive"]) == "inconclusive"
    assert worst(["pass"]) == "pass"
    assert worst([]) == "invalid"


def judged(outcome: Any) -> PairSummary:
    return replace(pair(), verdict=Verdict(outcome=outcome, passed=None, results=()))


@pytest.mark.parametrize(
    ("outcomes", "inconclusive", "code"),
    [
        (["pass", "pass"], "inconclusive", 0),
        (["pass", "fail"], "inconclusive", 1),
        (["inconclusive", "pass"], "inconclusive", 3),
        (["inconclusive", "pass"], "fail", 1),
        (["inconclusive", "pass"], "pass", 0),
        (["inconclusive", "fail"], "pass", 1),
        (["inconclusive", "fail"], "inconclusive", 1),
        (["fail", "invalid"], "pass", 4),
    ],
)
def test_exit_codes(outcomes: list[str], inconclusive: Any, code: int) -> None:
    summary = report(*(judged(outcome) for outcome in outcomes))
    gates = replace(over(1.0), inconclusive=inconclusive)
    assert exit_code(replace(summary, gating=gates)) == code


def test_an_invalid_candidate_is_4_with_and_without_gates() -> None:
    bad = (InvalidPair(candidate="b", message="no rows", hint=None),)
    assert exit_code(report(pair(), invalid=bad)) == 4
    assert exit_code(replace(report(judged("fail"), invalid=bad), gating=over(1.0))) == 4
    assert exit_code(report(pair())) == 0
