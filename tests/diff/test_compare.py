from __future__ import annotations

import numpy as np
import pytest

from tests.diff.synthetic import FakeAudit, Logits, compare_all, model_audit, run_info, run_table
from trace_audit.diff.compare import Comparison, compare
from trace_audit.diff.source import AuditSource
from trace_audit.diff.summary import ReportSummary
from trace_audit.errors import InvalidComparisonError, UsageError

LENGTH = 32


def logits(sigma: float) -> Logits:
    generator = np.random.default_rng(0)
    record = generator.normal(0, 2.5, (8 * LENGTH, 60))
    return record + sigma * generator.normal(0, 1.0, record.shape)


def audit(**extra: Logits) -> FakeAudit:
    return model_audit({"record": logits(0), "noisy": logits(0.1), **extra}, length=LENGTH)


def run(data: FakeAudit, *candidates: str) -> tuple[ReportSummary, list[Comparison]]:
    return compare_all(data, "record", candidates)


def one(data: FakeAudit, candidate: str, baseline: str = "record") -> Comparison:
    return compare(AuditSource(data), baseline, candidate)  # type: ignore[arg-type]


def test_bit_equal_runs_are_bitwise_and_have_no_table() -> None:
    summary = one(audit(same=logits(0)), "same").summary
    assert summary.bitwise
    assert summary.metrics == ()
    assert summary.worst == ()
    assert summary.first_difference is None


def test_one_changed_bit_is_not_bitwise() -> None:
    changed = logits(0)
    last = LENGTH + 3
    changed[last, 59] = np.nextafter(np.float32(changed[last, 59]), np.float32(9))
    summary = one(audit(bit=changed), "bit").summary
    assert not summary.bitwise
    assert summary.unequal_rows == 1
    assert summary.first_difference is not None
    assert summary.first_difference.sequence_id == "s1"
    assert summary.first_difference.step == 3


def test_equal_logprobs_without_hashes_are_not_bitwise() -> None:
    data = audit()
    values = data.tables["record"]["logprob"].to_numpy()
    data.tables["imported"] = run_table(data.sequences, {"logprob": values})
    summary = one(data, "imported").summary
    assert not summary.bitwise
    assert summary.unequal_rows is None
    metric = summary.metric("delta.equal")
    assert metric is not None
    assert metric.value == 1.0


def test_swapping_the_runs_negates_the_bias_and_mirrors_kl() -> None:
    forward = one(audit(), "noisy").summary
    backward = one(audit(), "record", baseline="noisy").summary
    for name, mirrored, sign in (
        ("delta.mean", "delta.mean", -1),
        ("kl.mean", "kl.reverse", 1),
        ("kl.reverse", "kl.mean", 1),
    ):
        a, b = forward.metric(name), backward.metric(mirrored)
        assert a is not None
        assert b is not None
        assert a.value is not None
        assert b.value == pytest.approx(sign * a.value, rel=1e-9)


def test_a_flip_carries_its_margins() -> None:
    summary = one(audit(), "noisy").summary
    assert summary.flips.flips > 0
    for token in summary.flips.examples:
        assert token.change in ("flip", "hard flip")
        assert token.margin is not None
        assert token.margin > 0
        assert token.candidate_margin is not None
    margins = [token.margin for token in summary.flips.examples]
    assert margins == sorted(margins, reverse=True)  # type: ignore[type-var]


def test_worst_tokens_are_in_their_text_with_both_sides() -> None:
    comparison = one(audit(), "noisy")
    worst = comparison.summary.worst[0]
    metric = comparison.summary.metric("abs.max")
    assert metric is not None
    assert abs(worst.delta) == metric.value
    assert worst.text == f" w{worst.token_id}"
    sequence = int(worst.place.sequence_id[1:])
    previous = comparison.pair.trace.token_id[sequence * LENGTH + worst.place.step - 1]
    assert worst.before.endswith(f" w{previous}")
    assert [len(top) for top in (worst.baseline_top, worst.candidate_top)] == [5, 5]
    assert worst.baseline_top[0].token_id == worst.token_id


def test_the_first_output_token_shows_the_prompt_before_it() -> None:
    assert one(audit(), "noisy").details.tokens([0])[0].before == " w0 w1 w2 w3 w4"


def test_hostile_token_text_is_neutral_before_it_reaches_a_renderer() -> None:
    data = audit()
    data.texts = dict.fromkeys(range(60), b"\x1b[31m\x00\xff")
    token = one(data, "noisy").details.tokens([0])[0]
    for text in (token.text, token.before, token.after, token.baseline_top[0].text):
        assert "\x1b" not in text
        assert "\x00" not in text


def test_non_finite_candidate_rows_are_counted_and_listed_first() -> None:
    data = audit()
    values = data.tables["noisy"]["logprob"].to_numpy().copy()
    values[[5, 40]] = np.nan, -np.inf
    data.tables["noisy"] = data.tables["noisy"].set_column(
        6, data.tables["noisy"].schema.field(6), [values]
    )
    summary = one(data, "noisy").summary
    assert summary.non_finite == 2
    assert summary.first_non_finite is not None
    assert (summary.first_non_finite.sequence_id, summary.first_non_finite.step) == ("s0", 5)
    assert not np.isfinite([token.delta for token in summary.worst[:2]]).any()
    metric = summary.metric("abs.mean")
    assert metric is not None
    assert metric.value is not None
    assert np.isfinite(metric.value)


def test_candidates_are_sorted_by_cost() -> None:
    data = audit(slow=logits(0.2), unknown=logits(0.3))
    data.infos["noisy"]["timing"]["engine_seconds"] = 0.5
    data.infos["unknown"]["timing"] = {}
    summary, done = run(data, "unknown", "slow", "noisy")
    assert [pair.candidate.name for pair in summary.pairs] == ["noisy", "slow", "unknown"]
    assert [c.summary for c in done] == list(summary.pairs)


def test_one_invalid_candidate_does_not_hide_the_others() -> None:
    data = audit(broken=logits(0.1))
    data.tables["broken"] = data.tables["broken"].slice(1)
    summary, _ = run(data, "broken", "noisy")
    assert [pair.candidate.name for pair in summary.pairs] == ["noisy"]
    assert summary.invalid[0].candidate == "broken"
    assert "lacks 1 of" in summary.invalid[0].message


def test_only_invalid_candidates_are_an_error() -> None:
    data = audit(broken=logits(0.1))
    data.tables["broken"] = data.tables["broken"].slice(1)
    with pytest.raises(InvalidComparisonError):
        run(data, "broken")


def test_nothing_to_compare_is_an_error_and_so_is_a_run_with_itself() -> None:
    with pytest.raises(UsageError, match="no run to compare"):
        run(audit())
    with pytest.raises(UsageError, match="both baseline and candidate"):
        run(audit(), "record")


def test_configuration_differences_reach_the_summary() -> None:
    data = audit()
    data.infos["noisy"] = run_info("noisy", dtype="bfloat16", attention_backend="sdpa")
    summary = one(data, "noisy").summary
    assert [d.key for d in summary.config_differences] == [
        "engine.attention_backend",
        "engine.dtype",
    ]
    assert any("2 config keys differ" in line for line in summary.warnings)


def test_next_commands_name_what_diverged_most() -> None:
    summary, _ = run(audit(worse=logits(0.5)), "noisy", "worse")
    commands = [command for command, _ in summary.next_commands]
    assert commands[0] == "trace-audit diff report audit --candidate worse"
    assert "trace-audit diff show audit --candidate worse --worst 20" in commands


def test_several_samples_of_a_prompt_are_one_group() -> None:
    data = model_audit(
        {"record": logits(0), "noisy": logits(0.1)}, length=LENGTH, groups=list("aabbccdd")
    )
    summary = one(data, "noisy").summary
    assert (summary.sequences, summary.groups) == (8, 4)
