"""Verdict, gates and floors as rows of text, shared by every renderer."""

from __future__ import annotations

import math

from trace_audit.diff.catalog import CATALOG
from trace_audit.diff.summary import PairSummary
from trace_audit.diff.verdict import FloorSummary, GateResult, Gating, Outcome
from trace_audit.report.format import NOT_AVAILABLE, interval, number, number_up, plain, signed
from trace_audit.text import plural

GATE_HEADERS = ("gate", "value, 95 % interval", "fails over", "passes from", "result")
WORDS: dict[Outcome, str] = {
    "pass": "PASS",
    "fail": "FAIL",
    "inconclusive": "INCONCLUSIVE",
    "invalid": "INVALID",
}
_WATCHED: dict[Outcome, str] = {
    "pass": "ok",
    "fail": "over",
    "inconclusive": "open",
    "invalid": "n/a",
}
_RATIOS_SHOWN = ("abs.mean", "kl.mean", "top1.disagreement")
_NO_FLOOR = "No floor was measured; `replay --repeat 2` measures one."


def verdict_word(pair: PairSummary) -> str:
    """The verdict in at most two words; nothing where nothing was gated."""
    verdict = pair.verdict
    if verdict is None:
        return ""
    word = WORDS[verdict.outcome]
    return word if verdict.passed is None else f"{word} {verdict.passed}"


def verdict_line(pair: PairSummary, gating: Gating | None) -> str | None:
    """The verdict in one sentence; None where nothing was gated."""
    if pair.verdict is None or gating is None:
        return None
    names = f"{plain(pair.candidate.name)} against {plain(pair.baseline.name)}"
    profile = "" if gating.profile is None else f", profile {plain(gating.profile)}"
    reason = "" if pair.verdict.reason is None else f": {pair.verdict.reason}"
    return f"{verdict_word(pair)}  {names}{profile}{reason}."


def gate_rows(pair: PairSummary) -> list[tuple[str, str, str, str, str]]:
    """A row a gate, in the order of ``GATE_HEADERS``."""
    results = () if pair.verdict is None else pair.verdict.results
    return [_row(pair, result) for result in results]


def source_lines(gating: Gating | None) -> list[str]:
    """Where the bounds come from; the same for every candidate."""
    gates = () if gating is None else gating.gates
    return [
        f"{gate.metric} over {number(gate.bound, CATALOG[gate.metric].unit)}: {plain(gate.source)}"
        for gate in gates
        if gate.bound is not None and gate.source != "--fail-on"
    ]


def gate_lines(pair: PairSummary) -> list[str]:
    """What a reader needs beside the gates' numbers: floors, reasons, what would decide."""
    results = () if pair.verdict is None else pair.verdict.results
    return [line for result in results for line in _lines(pair, result)]


def floor_lines(pair: PairSummary) -> list[str]:
    """What repeats of the two runs say about noise."""
    measured = [_floor(floor) for floor in pair.floors if floor.pairs]
    if not measured:
        return [_NO_FLOOR]
    ratios = [
        f"{metric.label} {number(metric.floor.ratio)} times"
        for metric in (pair.metric(name) for name in _RATIOS_SHOWN)
        if metric is not None and metric.floor is not None and metric.floor.ratio is not None
    ]
    if ratios:
        measured.append(f"Over its floor: {', '.join(ratios)}.")
    return measured


def referee_line(pair: PairSummary) -> str | None:
    """Which side is nearer to the referee, in one sentence; None without a referee."""
    referee = pair.referee
    if referee is None:
        return None
    name = plain(referee.run)
    if referee.difference is None or referee.baseline_kl is None or referee.candidate_kl is None:
        return f"Referee {name}: n/a: {plain(referee.reason)}."
    word = {"undecided": "neither nearer nor farther for certain"}.get(
        referee.nearness, referee.nearness
    )
    left_out = f"; {referee.left_out:,} tokens left out" if referee.left_out else ""
    return (
        f"Referee {name}: the candidate is {word}: KL({name} || candidate) "
        f"{number(referee.candidate_kl)}, KL({name} || baseline) {number(referee.baseline_kl)}, "
        f"difference {signed(referee.difference)} {interval(referee.interval, 'nats')} nats, "
        f"margin {number(referee.margin)}{left_out}."
    )


def floor_warnings(pair: PairSummary) -> list[str]:
    """Repeats that could not be used, and floors that no run would pass."""
    lines = [
        f"left out of the {floor.kind} floor of {plain(floor.run)}: {plain(reason)}"
        for floor in pair.floors
        for reason in floor.left_out
    ]
    for result in () if pair.verdict is None else pair.verdict.results:
        if result.floor_over_bound and result.floor is not None and result.bound is not None:
            lines.append(
                f"the {result.floor.kind} floor of {result.gate.metric}, "
                f"{number(result.floor.value, result.unit)} between repeats of "
                f"{plain(result.floor.run)}, is over its bound {number(result.bound, result.unit)}"
            )
    return lines


def _row(pair: PairSummary, result: GateResult) -> tuple[str, str, str, str, str]:
    unit = result.unit
    value = NOT_AVAILABLE if result.value is None else number(result.value, unit)
    if result.census and pair.unequal_rows is not None:
        value = f"{pair.unequal_rows:,} of {pair.tokens:,} rows"
    elif result.interval is not None:
        value = f"{value} {interval(result.interval, unit)}"
    watched = f"{_WATCHED[result.outcome]} (watched)"
    return (
        result.gate.metric,
        value,
        NOT_AVAILABLE if result.threshold is None else number(result.threshold, unit),
        NOT_AVAILABLE if result.passing_bound is None else number_up(result.passing_bound, unit),
        watched if result.gate.watch else WORDS[result.outcome],
    )


def _lines(pair: PairSummary, result: GateResult) -> list[str]:
    gate, name = result.gate, result.gate.metric
    lines = []
    if result.floor is not None and gate.floor_factor and result.threshold != result.bound:
        floor = f"{number(result.floor.value, result.unit)} "
        floor += interval(result.floor.interval, result.unit)
        lines.append(
            f"{name}: the threshold is {gate.floor_factor:g} times its {result.floor.kind} floor "
            f"{floor.strip()}{_from_neutral(name)}"
        )
    if result.reason is not None:
        lines.append(f"{name}: {plain(result.reason)}")
    elif result.outcome == "inconclusive" and not gate.watch:
        lines.append(f"{name}: {_what_would_decide(pair, result)}")
    return lines


def _what_would_decide(pair: PairSummary, result: GateResult) -> str:
    if result.sequences_needed is None:
        return "no number of sequences would decide: the value is at the threshold"
    about = f"about {result.sequences_needed:,} sequences like these {pair.sequences:,}"
    if result.interval is not None and math.isinf(result.interval.high):
        return f"too few tokens for an upper bound of the quantile; {about} would give one"
    return f"{about} would decide"


def _from_neutral(name: str) -> str:
    neutral = CATALOG[name].neutral
    return f", counted from {neutral:g}" if neutral else ""


def _floor(floor: FloorSummary) -> str:
    text = (
        f"Floor: {floor.kind} of {plain(floor.run)}, {plural(len(floor.runs), 'run')}, "
        f"{plural(floor.pairs, 'pair')}: "
    )
    if floor.bitwise:
        what = "bitwise reproducible" if floor.kind == "rerun" else "batch invariant"
        return f"{text}the floor is exactly 0, {what}."
    if floor.unequal_share is None:
        return f"{text}a run has no logits hash, so equal rows are unknown."
    return f"{text}up to {number(floor.unequal_share, 'share')} of the rows differ."
