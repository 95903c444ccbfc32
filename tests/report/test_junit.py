from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from tests.diff.test_gate import judged, measured, over
from tests.report.samples import hostile_pair, pair, report
from trace_audit.diff.gate import judge
from trace_audit.diff.summary import InvalidPair, PairSummary, ReportSummary
from trace_audit.diff.verdict import Gating
from trace_audit.report.junit import render_junit
from trace_audit.report.markdown import PARTS, render_markdown


def gated(gating: Gating, *pairs: PairSummary) -> ReportSummary:
    summary = report(*(replace(one, verdict=judge(one, gating)) for one in pairs))
    return replace(summary, gating=gating)


def suite(summary: ReportSummary) -> ElementTree.Element:
    return ElementTree.fromstring(render_junit(summary).encode("utf-8"))


@pytest.mark.parametrize(
    ("bound", "element", "kind"),
    [(0.006, None, None), (0.004, "failure", "INCONCLUSIVE"), (0.001, "failure", "FAIL")],
)
def test_a_case_a_gate(bound: float, element: str | None, kind: str | None) -> None:
    root = suite(gated(over(bound), measured()))
    (case,) = root.findall("testcase")
    assert (case.get("classname"), case.get("name")) == ("bf16-sdpa", "kl.mean")
    assert [child.tag for child in case] == ([] if element is None else [element])
    assert root.get("failures") == str(int(element is not None))
    if element is not None:
        assert case[0].get("type") == kind
        assert "passes from" in str(case[0].get("message"))


def test_an_invalid_gate_and_an_invalid_candidate_are_errors() -> None:
    bad = InvalidPair(candidate="b", message="Run 'b' <has> no \x1b rows.", hint=None)
    summary = replace(gated(over(1.0), measured(value=None, note="no support")), invalid=(bad,))
    root = suite(summary)
    assert (root.get("tests"), root.get("errors")) == ("2", "2")
    texts = [str(error.text) for error in root.iter("error")]
    assert "<has>" in texts[0]
    assert "\x1b" not in texts[0]
    assert "no support" in texts[1]


def test_what_inconclusive_counts_as_is_what_the_case_says() -> None:
    passed = suite(gated(replace(over(0.004), inconclusive="pass"), measured()))
    assert passed.get("failures") == "0"
    failed = suite(gated(replace(over(0.004), inconclusive="fail"), measured()))
    assert failed.find("testcase/failure") is not None


def test_a_non_finite_candidate_fails_a_case_of_its_own() -> None:
    root = suite(gated(over(1.0), replace(measured(), non_finite=2)))
    assert [case.get("name") for case in root.iter("testcase")] == ["kl.mean", "finite"]
    assert root.get("failures") == "1"


def test_without_gates_a_case_a_candidate() -> None:
    root = suite(report(pair("a"), pair("b")))
    assert [case.get("classname") for case in root.iter("testcase")] == ["a", "b"]
    assert root.get("failures") == "0"


def test_markup_in_names_is_text() -> None:
    suite(report(hostile_pair(), pair("\ud800")))


def test_markdown_is_shortened_worst_tokens_first_and_the_verdict_never() -> None:
    summary = gated(over(0.001), measured())
    whole = render_markdown(summary)
    assert "Worst tokens" in whole
    first = render_markdown(summary, max_chars=len(whole) - 1)
    assert "<details><summary>Worst tokens" not in first
    assert "95 % interval" in first
    assert "*Left out to be short: worst tokens.*" in first
    shortest = render_markdown(summary, max_chars=1)
    assert f"*Left out to be short: {', '.join(PARTS)}.*" in shortest
    assert "### FAIL" in shortest
    assert "| kl.mean |" in shortest
    assert len(shortest) < len(first) < len(whole)
    assert render_markdown(summary, max_chars=len(whole)) == whole


def test_a_shortened_report_keeps_refusals_and_warnings() -> None:
    bad = InvalidPair(candidate="b", message="Run 'b' has no rows.", hint=None)
    summary = replace(report(judged("fail"), judged("pass")), invalid=(bad,))
    text = render_markdown(summary, max_chars=1)
    assert "INVALID" in text
    assert "**warning:**" in text
