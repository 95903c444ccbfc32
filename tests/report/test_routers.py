"""Which layers chose other experts, in every format; nothing of it for a model without routers."""

from __future__ import annotations

import json
import re

import pytest

from tests.diff.synthetic import compare_all
from tests.diff.test_router import A, audit_of
from trace_audit.diff.exhibit import exhibit
from trace_audit.diff.source import AuditSource
from trace_audit.diff.summary import ReportSummary
from trace_audit.report.as_json import render_json
from trace_audit.report.html import render_html
from trace_audit.report.markdown import render_markdown
from trace_audit.report.router_view import router_chart, router_lines
from trace_audit.report.terminal import render_terminal


def summary_of(*arguments: object, **options: object) -> ReportSummary:
    return compare_all(audit_of(*arguments, **options), "record", ["b"])[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [80, 160])
def test_the_terminal_says_where_and_how_much(width: int) -> None:
    lines = render_terminal(summary_of(), width=width, color=False).splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert "Routers: experts chosen" in text
    assert "router calls that differ 33.3 %" in text
    assert (
        "routers: other experts (2 of 8) in 4 of 12 calls, on 3 tokens; the first layer that "
        "differs is 1" in text
    )
    assert re.search(r"routers by layer: 1 .█ 3; largest 50.0 % \[.*?\] % in layer 3", text)
    for label, tokens, mean in (("0", 3, "0.100"), ("1", 2, "0.250"), ("2", 1, "0.800")):
        assert f"routers changed {label} {tokens} {mean}" in text
    worst = next(line for line in lines if line.lstrip().startswith("+0.800"))
    assert " 2 " in worst


def test_markdown_json_and_html_say_it_too() -> None:
    audit = audit_of()
    summary, comparisons = compare_all(audit, "record", ["b"])
    assert "other experts (2 of 8) in 4 of 12 calls" in render_markdown(summary)
    pair = json.loads(render_json(summary))["pairs"][0]
    assert pair["router"]["first_layer"] == 1
    assert [layer["layer"] for layer in pair["router"]["layers"]] == [1, 3]
    assert pair["worst"][0]["routers_changed"] == 2
    shown = exhibit(AuditSource(audit), comparisons[0])  # type: ignore[arg-type]
    page = render_html(summary, [shown])
    assert "Routers by layer" in page
    assert "layer 3: 50.0 %" in page
    assert "router.disagreement" in page


def test_a_chart_has_a_bar_a_layer_and_its_numbers() -> None:
    chart = router_chart(summary_of().pairs[0])
    assert chart is not None
    assert [row[0] for row in chart.rows] == ["1", "3"]
    heights = [mark.height for mark in chart.marks]
    assert heights[1] == pytest.approx(3 * heights[0], abs=0.2)


def test_the_same_experts_are_said_and_not_drawn() -> None:
    pair = summary_of(A, A).pairs[0]
    assert router_lines(pair) == [("routers", "the same experts in all 12 calls")]
    assert router_chart(pair) is None


def test_a_model_without_routers_is_told_nothing_of_them() -> None:
    summary = summary_of(None, None, routing=None)
    for text in (
        render_terminal(summary, width=80, color=False),
        render_markdown(summary),
    ):
        assert "outer" not in text
    pair = json.loads(render_json(summary))["pairs"][0]
    assert pair["router"] is None
    assert not [m for m in pair["metrics"] if m["section"] == "router"]


def test_what_is_not_recorded_is_told_with_its_reason() -> None:
    summary = summary_of(A, None)
    text = " ".join(render_terminal(summary, width=80, color=False).split())
    assert "router.abs_share: run 'b' stores no expert choices" in text
    assert "Routers: experts chosen" not in text
