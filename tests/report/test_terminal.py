from __future__ import annotations

import re
from dataclasses import replace

import pytest
from rich.cells import cell_len

from tests.report.samples import HOSTILE, bitwise, hostile_pair, pair, report, token
from trace_audit.diff.summary import Difference, InvalidPair, Place, ReportSummary
from trace_audit.report.terminal import render_terminal
from trace_audit.report.token_view import render_tokens

WIDTHS = [80, 160]


def plain(summary: ReportSummary, width: int = 80) -> str:
    return render_terminal(summary, width=width, color=False)


def joined(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "summary",
    [report(), report(pair("a"), bitwise("b")), report(bitwise()), report(hostile_pair())],
)
def test_no_line_is_wider_than_the_terminal(summary: ReportSummary, width: int) -> None:
    for line in plain(summary, width).splitlines():
        assert cell_len(line) <= width, line


@pytest.mark.parametrize("width", WIDTHS)
def test_every_metric_has_its_value_and_interval_uncut(width: int) -> None:
    text = plain(report(), width)
    for metric in pair().metrics:
        if metric.value is not None:
            assert metric.label.strip() in text, metric.name
    assert "…" not in text.split("first differing bit")[0]
    assert "[0.0110, 0.0137]" in text


def test_a_wide_terminal_is_used() -> None:
    assert len(plain(report(), 160).splitlines()) < len(plain(report(), 80).splitlines()) - 10


def test_without_color_there_is_no_escape_sequence() -> None:
    for summary in (report(), report(pair("a"), bitwise("b"))):
        assert "\x1b" not in plain(summary)
    assert "\x1b[" in render_terminal(report(), width=80, color=True)


def test_color_changes_nothing_but_styles() -> None:
    colored = render_terminal(report(), width=80, color=True)
    stripped = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", colored).splitlines()]
    assert stripped == plain(report()).splitlines()


def test_the_report_says_what_a_reader_must_know() -> None:
    text = joined(plain(report()))
    assert "delta = candidate minus baseline" in text
    assert "positive: the candidate is more confident" in text
    assert "KL is KL(record || bf16-sdpa)" in text
    assert "effective N 800 (design effect 1.3)" in text
    assert "Most influential sequence: s1, with 25.0 % of the summed |delta|" in text
    assert "Smallest change seen with 80 % power: mean |delta| 0.00200" in text
    assert "warning: 2 config keys differ" in text
    assert "engine.dtype * float32 bfloat16" in text
    assert "eager (asked for auto)" in text
    assert "a1b2c3d4e5f6" in text
    assert "vocabulary 49,152 (tokenizer 49,149)" in text
    assert "first differing bit: position 42 (sequence s0, step 0)" in text
    assert "3 flips, 2 tie changes in 1,024 tokens; 1 hard (margin over 0.0600 nats)" in text
    assert "n/a: kl.k1, kl.k3: the trace is greedy" in text
    assert "The quick brown« fox» jumps" in text
    assert "trace-audit diff show audit --candidate bf16-sdpa" in text


def test_a_different_environment_is_spelled_out() -> None:
    changed = (Difference(key="versions.torch", baseline="2.13.0", candidate="2.11.0"),)
    other = replace(pair().candidate, environment_fingerprint="ff" * 32)
    text = joined(plain(report(replace(pair(), environment_differences=changed, candidate=other))))
    assert "versions.torch * 2.13.0 2.11.0" in text
    same = joined(plain(report(replace(pair(), environment_differences=changed))))
    assert "versions.torch" not in same


def test_the_sparkline_shows_where_it_starts() -> None:
    assert "mean |delta| by position: 42 ··▃█ 169" in plain(report())


def test_bitwise_is_one_line_without_a_table() -> None:
    text = plain(report(bitwise()))
    assert "BITWISE  same against record: all 1,024 rows are bit-equal." in text
    assert "95 % interval" not in text


@pytest.mark.parametrize("width", [80, 160])
def test_names_of_configurations_are_whole_in_the_grid(width: int) -> None:
    names = ("bf16-fp32head", "bf16-w8-kv-fp8-e4m3")
    lines = plain(report(*(pair(name) for name in names)), width).splitlines()
    (at,) = [i for i, line in enumerate(lines) if line.split()[-1:] == ["seconds"]]
    assert [line.split()[0] for line in lines[at + 1 : at + 3]] == list(names)
    assert max(len(line) for line in lines) <= width


def test_several_candidates_share_one_grid() -> None:
    text = plain(report(pair("first"), bitwise("other")))
    grid = text[text.index("unequal") :]
    assert grid.index("first") < grid.index("other")
    assert text.count("95 % interval") == 0
    row = next(line for line in text.splitlines() if line.startswith("other"))
    assert "BITWISE" in row


def test_invalid_candidates_are_named_with_their_reason() -> None:
    bad = InvalidPair(candidate="b", message="Run 'b' has no rows.", hint=None)
    assert "INVALID  b: Run 'b' has no rows." in plain(report(pair(), invalid=(bad,)))


@pytest.mark.parametrize("width", WIDTHS)
def test_markup_in_tokens_and_names_is_shown_literally(width: int) -> None:
    text = plain(report(hostile_pair()), width)
    assert "[bold]x[/bold]" in text
    assert "<script>" in text
    wide = plain(report(hostile_pair()), 160)
    assert f"«{HOSTILE}»"[:20] in wide


def test_control_characters_in_names_are_visible() -> None:
    hostile = replace(pair("a\x1b[31mb"), warnings=("x\x07y",))
    text = plain(report(hostile))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "31mb" in text


def test_a_lone_surrogate_in_an_id_does_not_break_the_report() -> None:
    bad = token(place=Place(sequence_id="\ud800", step=0, position=5))
    text = plain(report(replace(pair(), worst=(bad,))))
    text.encode("utf-8")


def test_non_finite_rows_come_first_and_loud() -> None:
    bad = replace(
        pair(),
        non_finite=3,
        first_non_finite=Place(sequence_id="s4", step=9, position=51),
        worst=(token(delta=float("nan"), candidate_logprob=float("nan")),),
    )
    text = joined(plain(report(bad)))
    assert "warning: 3 candidate logprobs not finite" in text
    assert "position 51 (sequence s4, step 9)" in text
    assert " nan " in text


def test_wide_characters_do_not_push_the_token_out_of_view() -> None:
    wide = token(before="漢字" * 40, text="語", after="仮名" * 40)
    text = plain(report(replace(pair(), worst=(wide,))))
    assert "«語»" in text


def test_show_prints_both_sides() -> None:
    text = render_tokens(pair(), [token()], width=80, color=False)
    flat = joined(text)
    assert "position 45 (sequence s1, step 3)" in flat
    assert "delta -1.25 nats (-0.250 to -1.50), rank 1 to 2, KL 0.125" in flat
    assert "best token: hard flip; margin 0.750 to -0.500 nats" in flat
    assert "decode, 8 tokens of 8 requests" in flat
    assert "« fox»" in flat
    assert "dog" in flat
    assert all(cell_len(line) <= 80 for line in text.splitlines())


def test_show_without_a_difference_says_so() -> None:
    assert "No token differs." in render_tokens(bitwise(), [], width=80, color=False)


def test_a_command_to_copy_is_never_wrapped() -> None:
    command = "trace-audit diff show audit --candidate " + "a" * 80 + " --worst 20"
    text = plain(replace(report(), next_commands=((command, "the worst tokens"),)), 80)
    assert command in text


def test_preemptions_are_shown_where_there_were_any() -> None:
    one = pair()
    calm = replace(one.baseline, preemptions=0)
    quiet = replace(one, baseline=calm, candidate=replace(one.candidate, preemptions=0))
    assert "preemptions" not in plain(report(quiet))
    squeezed = replace(one, baseline=calm, candidate=replace(one.candidate, preemptions=21))
    (line,) = [x for x in plain(report(squeezed)).splitlines() if "preemptions" in x]
    assert [word for word in line.split() if word.isdecimal()] == ["0", "21"]


def test_the_share_of_accepted_drafts_is_shown_of_runs_that_draft() -> None:
    assert "drafts kept" not in plain(report())
    one = pair()
    drafted = replace(
        one, candidate=replace(one.candidate, acceptance_rate=0.625, draft_tokens=1200)
    )
    (line,) = [x for x in plain(report(drafted)).splitlines() if "drafts kept" in x]
    assert line.split() == ["drafts", "kept", "62.5", "%", "of", "1,200"]


def test_an_empty_setting_can_be_seen() -> None:
    found = (Difference(key="speculative.draft_model", baseline="", candidate="small"),)
    assert 'speculative.draft_model: "" → small' in plain(
        report(pair("a", config_differences=found), pair("b"))
    )
