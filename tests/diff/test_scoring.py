"""Logprobs of different distributions are never compared, in whatever way they would be."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.cli.test_gates import LENGTH, Report, audit, logits, repeats, report
from tests.diff.run_infos import info
from tests.diff.synthetic import FakeAudit, compare_all, model_audit, run_info
from trace_audit.config import Distribution
from trace_audit.diff.compare import compare
from trace_audit.diff.expected import expectation
from trace_audit.diff.identity import check_comparable, run_identity
from trace_audit.diff.source import AuditSource
from trace_audit.errors import InvalidComparisonError
from trace_audit.report.identity_view import identity_rows
from trace_audit.report.view import warning_lines

__all__ = ["report"]

COLD = {"mode": "processed", "temperature": 0.7}
NUCLEUS = {"mode": "processed", "top_p": 0.9}
FEW = {"mode": "processed", "top_k": 5}
NEUTRAL = {"mode": "processed", "temperature": 1.0, "top_p": 1.0, "top_k": 0}
RAW = {"mode": "raw", "temperature": 1.0, "top_p": 1.0, "top_k": 0}


def scored(name: str, scoring: dict[str, Any] | None, **engine: Any) -> dict[str, Any]:
    """A run.json of this engine; without the table it is one from before there was one."""
    found = run_info(name, **({"dtype": "bfloat16"} | engine))
    if scoring is not None:
        found["resolved_config"]["scoring"] = scoring
    return found


def imported(scoring: dict[str, Any] | None) -> dict[str, Any]:
    return {"model": None} | ({} if scoring is None else {"scoring": scoring})


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (scored("x", None), Distribution()),
        (scored("x", RAW), Distribution()),
        (scored("x", NEUTRAL), Distribution()),
        (scored("x", COLD), Distribution(temperature=0.7)),
        (scored("x", COLD | {"top_p": 0.9, "top_k": 40}), Distribution(
            temperature=0.7, top_p=0.9, top_k=40)),
        (scored("x", FEW) | {"vocabulary_size": 5}, Distribution()),
        (scored("x", FEW) | {"vocabulary_size": 6}, Distribution(top_k=5)),
        (imported(None), None),
        (imported(RAW), Distribution()),
        (imported(NUCLEUS), Distribution(top_p=0.9)),
        ({"logprobs": "raw"}, Distribution()),
        ({}, None),
    ],
)  # fmt: skip
def test_what_a_run_scored(found: dict[str, Any], expected: Distribution | None) -> None:
    assert run_identity("x", found).distribution == expected


@pytest.mark.parametrize(
    ("one", "other"), [(None, COLD), (RAW, NUCLEUS), (COLD, NUCLEUS), (FEW, COLD), (NEUTRAL, FEW)]
)
def test_two_distributions_are_refused_either_way(one: Any, other: Any) -> None:
    for a, b in ((one, other), (other, one)):
        with pytest.raises(InvalidComparisonError, match="logprobs, the baseline has") as caught:
            check_comparable(scored("a", a), scored("b", b), "b")
        assert "\n" not in caught.value.message
        assert caught.value.hint is not None
        assert "same [scoring]" in caught.value.hint
    for declared in (imported(other),):
        with pytest.raises(InvalidComparisonError):
            check_comparable(declared, scored("b", one), "b")


@pytest.mark.parametrize(
    ("one", "other"), [(None, RAW), (RAW, NEUTRAL), (COLD, dict(COLD)), (FEW, FEW | {"top_p": 1.0})]
)
def test_one_distribution_said_in_two_ways_is_compared(one: Any, other: Any) -> None:
    check_comparable(scored("a", one), scored("b", other), "b")


def test_the_refusal_names_both_and_ends_with_4(
    report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    data = audit(b=logits(0.05))
    data.infos["b"] = scored("b", COLD | {"top_p": 0.9})
    assert report(data) == 4
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Run 'b' has temperature 0.7, top_p 0.9 logprobs, the baseline has raw ones." in (
        captured.err
    )
    assert "hint:" in captured.err


def test_a_refused_run_does_not_hide_the_others(
    report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    data = audit(b=logits(0.05), c=logits(0.05, 1))
    data.infos["b"] = scored("b", COLD)
    assert report(data, "--profile", "w8") == 4
    out = capsys.readouterr().out
    assert "INVALID  b: " in out
    assert "PASS" in out


def undeclared(scoring: dict[str, Any] | None) -> FakeAudit:
    data = model_audit(
        {"record": logits(0.005), "imported": logits(0)}, length=LENGTH, source="imported"
    )
    data.sampling = {}
    data.infos["imported"] = imported(scoring)
    return data


def test_an_import_that_does_not_say_is_reported_with_a_warning(
    report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(undeclared(None), "--baseline", "imported") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "warning: imported does not say how its logprobs were made" in out
    assert "logprobs * unknown raw" in out


@pytest.mark.parametrize("gate", [("--profile", "rl"), ("--fail-on", "abs.mean > 9")])
def test_an_import_that_does_not_say_is_not_gated(
    report: Report, capsys: pytest.CaptureFixture[str], gate: tuple[str, str]
) -> None:
    assert report(undeclared(None), "--baseline", "imported", *gate) == 4
    captured = capsys.readouterr()
    assert "INVALID  record against imported" in captured.out
    assert "record cannot be judged: imported does not say" in captured.err
    assert '"scoring": {"mode": "raw"}' in captured.err


def test_an_import_that_says_raw_is_gated(report: Report) -> None:
    assert report(undeclared(RAW), "--profile", "rl") == 0
    assert report(undeclared(COLD), "--profile", "rl") == 4


def test_the_panel_shows_what_was_scored_only_where_it_is_not_raw() -> None:
    data = audit(a=logits(0.05), b=logits(0.05, 1))
    for scoring, shown in ((RAW, []), (COLD, ["temperature 0.7"])):
        for name in "ab":
            data.infos[name] = scored(name, scoring)
        pair = compare(AuditSource(data), "a", "b").summary  # type: ignore[arg-type]
        rows = [row for row in identity_rows(pair) if row.label == "logprobs"]
        assert [row.baseline for row in rows] == shown
        assert pair.not_gated is None


def test_a_referee_of_another_distribution_is_refused(
    report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    data = audit(a=logits(0.05), b=logits(0.05, 1))
    for name in "ab":
        data.infos[name] = scored(name, COLD)
    arguments = ["--baseline", "a", "--candidate", "b"]
    assert report(data, *arguments, "--referee", "record") == 4
    assert "The referee 'record' has raw logprobs, the compared runs have temperature 0.7" in (
        capsys.readouterr().err
    )
    assert report(data, *arguments) == 0


def test_kl_excess_needs_a_record_of_the_same_distribution(
    report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    data = audit(a=logits(0.05), b=logits(0.05, 1))
    for name in "ab":
        data.infos[name] = scored(name, COLD)
    arguments = ["--baseline", "a", "--candidate", "b", "--profile", "kernel"]
    assert report(data, *arguments) == 4
    assert "the record has raw logprobs and a has temperature 0.7 ones" in capsys.readouterr().err
    data.infos["record"] = scored("record", COLD, dtype="float32", lm_head_dtype="float32")
    assert report(data, *arguments) in (0, 3)


@pytest.mark.parametrize("kind", ["rerun", "batch"])
def test_a_repeat_of_another_distribution_is_no_floor(kind: str) -> None:
    data = audit(a=logits(0.05), a2=logits(0.05, 1))
    data.infos["a2"] = scored("a2", COLD)
    repeats(data, "a2", "a", kind)
    (floor,) = compare(AuditSource(data), "record", "a").summary.floors  # type: ignore[arg-type]
    assert floor.pairs == 0
    assert "scoring.mode" in floor.left_out[0]


def sampled(temperature: float, scoring: dict[str, Any] | None) -> str | None:
    """Why k3 is n/a between two runs of a trace that the record sampled; None if it has a value."""
    data = model_audit({"record": logits(0), "b": logits(0.05)}, length=LENGTH, source="sampled")
    data.sampling = {"temperature": temperature}
    for name in ("record", "b"):
        data.infos[name] = scored(name, scoring)
    pair = compare(AuditSource(data), "record", "b").summary  # type: ignore[arg-type]
    metric = pair.metric("kl.k3")
    assert metric is not None
    return None if metric.value is not None else metric.note


def test_k3_holds_where_the_tokens_were_sampled_from_what_was_scored() -> None:
    assert sampled(1.0, None) is None
    assert sampled(0.7, COLD) is None
    assert sampled(1.0, NEUTRAL) is None
    assert sampled(0.7, None) == "the tokens were sampled at temperature 0.7, not 1"
    assert sampled(1.0, COLD) == "the tokens were sampled at temperature 1.0, not 0.7"
    assert sampled(1.0, NUCLEUS) == "the tokens were not sampled with top_p 0.9"


def test_one_distribution_said_in_two_ways_must_be_bit_equal() -> None:
    def ran(scoring: dict[str, Any]) -> dict[str, Any]:
        found = info()
        found["resolved_config"] = found["resolved_config"] | {"scoring": scoring}
        return found

    expected = expectation(ran(RAW), ran(NEUTRAL))
    assert expected is not None
    assert [key.key for key in expected.keys] == ["scoring.mode"]
    assert expectation(ran(RAW), ran(COLD)) is None
    assert expectation(ran(COLD), ran(NUCLEUS)) is None


def truncated(baseline: list[int], candidate: list[int]) -> FakeAudit:
    """Two runs with a filter that took the forced token away at some rows."""
    data = audit(a=logits(0.05), b=logits(0.05, 1))
    for name, rows in (("a", baseline), ("b", candidate)):
        data.infos[name] = scored(name, NUCLEUS)
        values = data.tables[name]["logprob"].to_numpy().copy()
        values[rows] = -np.inf
        index = data.tables[name].schema.get_field_index("logprob")
        field = data.tables[name].schema.field(index)
        data.tables[name] = data.tables[name].set_column(index, field, [values])
    return data


def test_tokens_that_the_baseline_filtered_out_are_counted_and_not_averaged() -> None:
    data = truncated([3, 9, 40], [9])
    pair = compare(AuditSource(data), "a", "b").summary  # type: ignore[arg-type]
    assert pair.non_finite == 0
    mean = pair.metric("abs.mean")
    assert mean is not None
    assert np.isfinite(mean.value)
    whole = truncated([], [])
    a, b = (whole.tables[name]["logprob"].to_numpy().astype(np.float64) for name in "ab")
    kept = np.delete(np.abs(b - a), [3, 9, 40])
    assert mean.value == pytest.approx(kept.mean(), rel=1e-9)
    assert any(
        "top_k or top_p left the forced token out in a alone at 2 tokens, in b alone at 0 and in "
        "both at 1" in line
        for line in warning_lines(pair)
    )


def test_a_token_that_the_candidate_alone_filtered_out_fails(
    report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--baseline", "a", "--candidate", "b", "--fail-on", "abs.mean > 9"]
    assert report(truncated([3], [3]), *arguments) == 0
    assert report(truncated([], [7]), *arguments) == 1
    assert "non-finite" in capsys.readouterr().out


def test_a_baseline_that_filters_nothing_must_still_be_finite() -> None:
    data = truncated([3], [])
    data.infos["a"] = data.infos["b"] = scored("x", COLD)
    with pytest.raises(InvalidComparisonError, match="1 non-finite logprobs"):
        compare(AuditSource(data), "a", "b")  # type: ignore[arg-type]


def test_every_row_filtered_out_leaves_nothing_to_judge(
    report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    everything = list(range(8 * LENGTH))
    data = truncated(everything, everything)
    arguments = ["--baseline", "a", "--candidate", "b", "--fail-on", "abs.mean > 9"]
    assert report(data, *arguments) == 4
    assert "no token has a finite logprob on both sides" in capsys.readouterr().err


def test_one_id_that_a_filter_leaves_is_no_flip_and_spoils_no_number() -> None:
    alone, few = logits(0.05), logits(0.05, 1)
    keep = np.argsort(-alone, axis=1)
    for row in range(0, len(alone), 2):
        alone[row, keep[row, 1:]] = -np.inf
        few[row, keep[row, 1 if row % 4 else 2 :]] = -np.inf
    data = audit(a=alone, b=few)
    for name in "ab":
        data.infos[name] = scored(name, NUCLEUS, dtype="float32", lm_head_dtype="float32")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair = compare(AuditSource(data), "a", "b").summary  # type: ignore[arg-type]
    assert pair.flips.known > 0
    assert np.isfinite([pair.flips.expected, pair.flips.scale, pair.flips.threshold]).all()


def test_undeclared_candidates_can_be_in_a_summary_of_several() -> None:
    data = undeclared(None)
    summary, _ = compare_all(data, "record", ["imported"])
    assert summary.pairs[0].not_gated is not None
    assert replace(summary.pairs[0], not_gated=None).verdict is None
