from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any, NoReturn

import pytest

from tests.report.samples import HOSTILE, bitwise, hostile_pair, pair, report, token
from trace_audit.diff.summary import Interval, Place
from trace_audit.report.as_json import render_json, render_pair_json
from trace_audit.report.format import (
    interval,
    number,
    plain,
    shorten_left,
    shorten_right,
    signed,
    sparkline,
)
from trace_audit.report.markdown import render_markdown


def strict(text: str) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_is_strict_and_writes_non_finite_numbers_as_strings() -> None:
    bad = token(delta=math.nan, candidate_logprob=-math.inf, kl=math.inf)
    document = strict(render_json(report(replace(pair(), worst=(bad,)))))
    worst = document["pairs"][0]["worst"][0]
    assert worst["delta"] == "NaN"
    assert worst["candidate_logprob"] == "-Infinity"
    assert worst["kl"] == "Infinity"


def test_json_has_every_metric_and_null_where_not_available() -> None:
    document = strict(render_json(report()))
    metrics = {m["name"]: m for m in document["pairs"][0]["metrics"]}
    assert metrics["abs.mean"]["value"] == 0.0123
    assert metrics["abs.mean"]["interval"] == {"low": 0.011, "high": 0.0137, "method": "t"}
    assert metrics["kl.k1"]["value"] is None
    assert metrics["kl.k1"]["note"] == "the trace is greedy"
    assert document["format_version"] == 1
    assert "candidate minus baseline" in document["conventions"]["delta"]


def test_json_survives_lone_surrogates_and_hostile_text() -> None:
    bad = token(place=Place(sequence_id="\ud800", step=0, position=1), text=HOSTILE)
    text = render_json(report(replace(pair(), worst=(bad,))))
    text.encode("ascii")
    worst = strict(text)["pairs"][0]["worst"][0]
    assert worst["place"]["sequence_id"] == "\ud800"
    assert worst["text"] == HOSTILE


def test_pair_json_is_narrowed_to_its_pair() -> None:
    first, second = pair("a"), pair("b")
    document = strict(render_pair_json(report(first, second), second))
    assert [p["candidate"]["name"] for p in document["pairs"]] == ["b"]


def test_markdown_has_tables_and_conventions() -> None:
    text = render_markdown(report())
    assert "delta = candidate minus baseline" in text
    assert "| 95 % interval |" in text
    assert "warning" in text
    assert "«" in text


def test_markdown_escapes_what_a_token_says() -> None:
    text = render_markdown(report(hostile_pair()))
    assert "<script>" not in text
    rows = [line for line in text.splitlines() if line.startswith("|") and "script" in line]
    assert rows
    for line in rows:
        # A pipe in a token must not open a new cell: one row has as many as its header.
        cells = len([c for i, c in enumerate(line) if c == "|" and line[i - 1] != "\\"])
        assert cells in (4, 9), line


def test_markdown_of_equal_runs_is_one_line() -> None:
    text = render_markdown(report(bitwise()))
    assert "BITWISE" in text
    assert "95 %" not in text


def test_markdown_of_several_candidates_has_a_grid() -> None:
    text = render_markdown(report(pair("a"), bitwise("b")))
    assert "| b | BITWISE |" in text


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (0.0, "nats", "0"),
        (0.0123456, "nats", "0.0123"),
        (0.5, "nats", "0.500"),
        (0.00999999, "nats", "0.0100"),
        (0.9999, "nats", "1.00"),
        (0.00099999, "nats", "0.00100"),
        (12.345, "nats", "12.3"),
        (1234.5, "nats", "1234"),
        (-3.2e-4, "nats", "-3.20e-4"),
        (0.25, "share", "25.0 %"),
        (0.0, "share", "0 %"),
        (1.0, "share", "100 %"),
        (1.0000123, "ratio", "1.000012"),
        (12.3456, "ppl", "12.3456"),
        (math.nan, "nats", "nan"),
        (-math.inf, "nats", "-inf"),
    ],
)
def test_numbers(value: float, unit: str, expected: str) -> None:
    assert number(value, unit) == expected


def test_signs_are_explicit() -> None:
    assert [signed(v) for v in (0.5, -0.5, 0.0)] == ["+0.500", "-0.500", "0"]


def test_intervals_are_in_the_unit_of_their_metric() -> None:
    bounds = Interval(low=0.01, high=0.02, method="t")
    assert interval(bounds, "share") == "[1.00, 2.00] %"
    assert interval(bounds, "nats") == "[0.0100, 0.0200]"
    assert interval(None, "nats") == ""


def test_sparkline_marks_exact_zeros_apart_from_small_values() -> None:
    assert sparkline(pair().buckets) == "··▃█"
    assert sparkline(()) == ""


def test_shortening_counts_cells() -> None:
    assert shorten_left("abcdef", 4) == "…def"
    assert shorten_right("abcdef", 4) == "abc…"
    assert shorten_right("漢字漢字", 5) == "漢字…"
    assert shorten_left("abc", 3) == "abc"


def test_plain_shows_configuration_values() -> None:
    assert [plain(v) for v in (None, True, 3, "x")] == ["-", "true", "3", "x"]
