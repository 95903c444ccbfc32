"""The report as JUnit XML: a test case a gate and candidate, for a CI's test view."""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape, quoteattr

from trace_audit.diff.summary import PairSummary, ReportSummary
from trace_audit.diff.verdict import GateResult, Gating, Outcome
from trace_audit.report import gate_view
from trace_audit.report.format import plain

# What a case says other than that it passed: JUnit knows failures and errors.
_ELEMENTS: dict[Outcome, str] = {"fail": "failure", "inconclusive": "failure", "invalid": "error"}

Case = tuple[str, str, Outcome, str]


def render_junit(summary: ReportSummary) -> str:
    """The report as one JUnit test suite, with a final newline.

    Watched gates are no test cases. Without gates a case a candidate says that it was compared.
    """
    cases = list(_cases(summary))
    counts = dict.fromkeys(("failure", "error"), 0)
    for _, _, outcome, _ in cases:
        if outcome in _ELEMENTS:
            counts[_ELEMENTS[outcome]] += 1
    name = quoteattr(f"trace-audit {plain(summary.trace.path)}")
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<testsuite name={name} tests="{len(cases)}" failures="{counts["failure"]}" '
        f'errors="{counts["error"]}" skipped="0">',
        *(line for case in cases for line in _lines(case)),
        "</testsuite>",
    ]
    return "\n".join(lines) + "\n"


def _cases(summary: ReportSummary) -> Iterable[Case]:
    for bad in summary.invalid:
        yield plain(bad.candidate), "compared", "invalid", plain(bad.message)
    for pair in summary.pairs:
        candidate = plain(pair.candidate.name)
        if pair.verdict is None or summary.gating is None:
            yield candidate, "compared", "pass", ""
            continue
        for result, row in zip(pair.verdict.results, gate_view.gate_rows(pair), strict=True):
            if not result.gate.watch:
                outcome = _counted(result.outcome, summary.gating)
                yield candidate, result.gate.metric, outcome, _message(pair, result, row)
        if pair.verdict.reason is not None:
            yield candidate, "finite", "fail", pair.verdict.reason


def _counted(outcome: Outcome, gating: Gating) -> Outcome:
    return gating.inconclusive if outcome == "inconclusive" else outcome


def _message(pair: PairSummary, result: GateResult, row: tuple[str, ...]) -> str:
    cells = zip(gate_view.GATE_HEADERS, row, strict=True)
    text = ", ".join(f"{header} {cell}" for header, cell in cells)
    lines = [line for line in gate_view.gate_lines(pair) if line.startswith(result.gate.metric)]
    return "\n".join([text, *lines])


def _lines(case: Case) -> Iterable[str]:
    candidate, gate, outcome, message = case
    head = f"  <testcase classname={quoteattr(candidate)} name={quoteattr(gate)}"
    if outcome not in _ELEMENTS:
        yield f"{head}/>"
        return
    element, word = _ELEMENTS[outcome], gate_view.WORDS[outcome]
    first = quoteattr(message.split("\n")[0])
    yield f"{head}>"
    yield f'    <{element} type="{word}" message={first}>{escape(message)}</{element}>'
    yield "  </testcase>"
