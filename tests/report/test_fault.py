"""A difference that may not be is called a fault, in every format."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rich.cells import cell_len

from tests.report.samples import HOSTILE, bitwise, expected, fault, pair, report
from trace_audit.diff.summary import Difference, PairSummary
from trace_audit.report.as_json import render_json
from trace_audit.report.markdown import render_markdown
from trace_audit.report.terminal import render_terminal

HEADLINE = (
    "FAULT  pp2 against record: 3 of 1,024 rows differ, and nothing between the two runs may "
    "change a bit (parallel.pipeline_parallel_size: 1 -> 2)."
)
REASON = "this is a fault, not drift: stages add nothing up; columns that differ: logprob"


def terminal(*pairs: PairSummary, width: int = 100, color: bool = False) -> str:
    return render_terminal(report(*pairs), width=width, color=color)


def joined(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("others", [(), (pair("other"),)])
def test_the_headline_says_fault_and_why(others: tuple[PairSummary, ...]) -> None:
    text = joined(terminal(fault(), *others))
    assert joined(HEADLINE) in text
    assert f"warning: {REASON}" in text
    assert "mean |delta|" in text


def test_a_fault_is_red_on_a_terminal() -> None:
    line = next(li for li in terminal(fault(), color=True, width=250).splitlines() if "FAULT" in li)
    assert line.startswith("\x1b[1;31mFAULT")


def test_the_grid_marks_a_fault_and_keeps_its_numbers() -> None:
    lines = terminal(fault(), bitwise("same")).splitlines()
    row = next(line for line in lines if line.startswith("pp2"))
    assert row.split()[:3] == ["pp2", "FAULT", "0.0123"]
    text = render_markdown(report(fault(), bitwise("same")))
    assert "| pp2 **FAULT** | 0.0123 |" in text
    assert "| same | BITWISE |" in text


def test_equal_rows_with_other_statistics_are_not_called_bitwise() -> None:
    broken = expected(differing_rows=2, differing_columns=("entropy",))
    odd = replace(bitwise("odd"), expected=broken)
    for text in (
        terminal(odd),
        terminal(odd, pair("other")),
        render_markdown(report(odd, pair("other"))),
    ):
        assert "FAULT" in text
        assert "BITWISE" not in text


def test_equal_rows_that_had_to_be_say_so() -> None:
    kept = replace(bitwise(), expected=expected())
    line = "BITWISE  same against record: all 1,024 rows are bit-equal, as it must be."
    assert line in terminal(kept)
    assert "as it must be" in render_markdown(report(kept))
    assert "as it must be" not in terminal(bitwise())


def test_an_expectation_that_is_void_is_told_and_is_no_fault() -> None:
    void = expected(void="12 of 1,024 rows come from launches of another shape", differing_rows=3)
    text = joined(terminal(pair("moved", expected=void)))
    assert "FAULT" not in text
    assert "warning: nothing asked for may change a bit, but 12 of 1,024 rows come from" in text
    assert "as it must be" not in terminal(replace(bitwise(), expected=void))


def test_json_has_the_expectation_and_the_fault() -> None:
    pairs = json.loads(render_json(report(fault(), pair("other"))))["pairs"]
    assert [p["fault"] for p in pairs] == [True, False]
    assert pairs[1]["expected"] is None
    assert pairs[0]["expected"] == {
        "keys": [{"key": "parallel.pipeline_parallel_size", "baseline": 1, "candidate": 2}],
        "reason": "stages add nothing up",
        "void": None,
        "differing_rows": 3,
        "differing_columns": ["logprob", "logits_hash"],
    }


def test_markdown_says_fault_in_its_heading() -> None:
    heading = next(li for li in render_markdown(report(fault())).splitlines() if "FAULT" in li)
    assert heading.startswith("### FAULT")
    assert heading.replace("\\", "") == f"### {HEADLINE}"


@pytest.mark.parametrize("width", [80, 160])
def test_hostile_values_and_narrow_terminals(width: int) -> None:
    key = Difference(key="engine.name", baseline=f"{HOSTILE}\x1b[31m", candidate="\x07")
    bad = pair("x", expected=expected(keys=(key,), differing_rows=1))
    text = terminal(bad, width=width)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert all(cell_len(line) <= width for line in text.splitlines())
    assert "<script>" not in render_markdown(report(bad))
