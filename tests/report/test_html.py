from __future__ import annotations

import base64
import hashlib
import math
import re
from dataclasses import replace
from importlib.resources import files

import numpy as np
import pytest

from tests.diff.synthetic import compare_all, run_table
from tests.diff.test_compare import LENGTH, audit, logits, one
from tests.report import samples
from tests.report.pages import HOSTILE, Page, hostile_audit, page
from trace_audit.diff.exhibit import exhibit
from trace_audit.diff.metric import Interval
from trace_audit.diff.source import AuditSource
from trace_audit.diff.summary import InvalidPair, PositionBucket
from trace_audit.report.charts import drift_chart
from trace_audit.report.format import metric_value, number, signed
from trace_audit.report.html import render_html
from trace_audit.report.scale import EDGES, css_class, legend
from trace_audit.report.token_data import script_json
from trace_audit.text import display_bytes

# Where the fields of a token are in the page's data.
DELTA, BASELINE, CANDIDATE, TOP_A, TOP_B = 2, 3, 4, 14, 16


@pytest.fixture(scope="module")
def noisy() -> Page:
    return Page(page(audit()))


def several() -> str:
    return page(audit(same=logits(0), third=logits(0.3)))


@pytest.mark.parametrize("make", [several, lambda: page(hostile_audit()), lambda: page(audit())])
def test_pages_are_well_formed_and_need_nothing_else(make: object) -> None:
    text = make()  # type: ignore[operator]
    found = Page(text)
    for tag, attributes in found.tags:
        assert tag not in ("iframe", "object", "embed", "img", "base", "form", "video", "audio")
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            assert name not in ("style", "src", "srcset", "action"), (tag, name)
            if name in ("href", "xlink:href"):
                assert value is not None
                assert value.startswith("#") or value == "data:,", value
    assert not re.search(r"(https?:)?//[a-z]", text), "an address"
    assert "@import" not in text
    assert "url(" not in text
    ids = found.ids()
    assert len(ids) == len(set(ids))
    links = {a["href"] for _, a in found.tags if (a.get("href") or "").startswith("#")}
    assert links <= {f"#{name}" for name in ids}


def test_the_policy_allows_this_style_and_script_and_no_more() -> None:
    text = page(audit())
    (policy,) = [
        a["content"]
        for tag, a in Page(text).tags
        if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for name in ("style", "script"):
        (content,) = re.findall(f"<{name}>(.*?)</{name}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy


def test_the_script_never_writes_markup() -> None:
    script = (files("trace_audit.report") / "page" / "report.js").read_text(encoding="ascii")
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval", "fetch"):
        assert word not in script


def test_a_page_is_ascii_and_the_same_twice() -> None:
    text = page(audit())
    text.encode("ascii")
    assert text == page(audit())


def test_the_page_says_what_the_other_formats_say(noisy: Page) -> None:
    summary = one(audit(), "noisy").summary
    assert "noisy against record: 256 tokens, mean |delta|" in noisy.text
    assert "positive: the candidate is more confident" in noisy.text
    # Eight rows that are absent for the same reason are told once, as a section.
    ratios = [metric for metric in summary.metrics if metric.section == "rl"]
    assert f"all {len(ratios)} metrics" in noisy.text
    for metric in summary.metrics:
        if metric in ratios:
            continue
        assert metric.label.strip() in noisy.text
        assert metric.name in noisy.text
        assert metric_value(metric) in noisy.text
    assert "a greedy trace is no sample" in noisy.text
    for token in summary.worst:
        assert signed(token.delta) in noisy.text


def test_token_data_are_the_runs_values(noisy: Page) -> None:
    comparison = one(audit(), "noisy")
    pair = comparison.pair
    assert noisy.data["pairs"] == [["record", "noisy"]]
    assert len(noisy.data["tokens"]) == 8 * LENGTH
    for row in (0, 37, 255):
        index, step = int(pair.sequence[row]), int(pair.step[row])
        found = noisy.data["tokens"][f"0-{index}-{step}"]
        (token,) = comparison.details.tokens([row])
        assert found[:2] == [token.token_id, token.place.position]
        assert noisy.data["texts"][str(token.token_id)] == token.text
        assert noisy.data["sequences"][str(index)] == token.place.sequence_id
        for field, value in (
            (DELTA, token.delta),
            (BASELINE, token.baseline_logprob),
            (CANDIDATE, token.candidate_logprob),
        ):
            assert found[field] == pytest.approx(value, rel=1e-6)
        assert found[5:8] == [token.baseline_rank, token.candidate_rank, token.change]
        for at, top in ((TOP_A, token.baseline_top), (TOP_B, token.candidate_top)):
            assert found[at - 1] == [entry.token_id for entry in top]
            assert found[at] == pytest.approx([entry.logprob for entry in top], rel=1e-6)


def test_tokens_in_the_text_have_their_color_and_change(noisy: Page) -> None:
    comparison = one(audit(), "noisy")
    spans = {a["id"]: a["class"] for tag, a in noisy.tags if tag == "span" and a.get("id")}
    assert len(spans) == 8 * LENGTH
    changes = {"hard flip": "hard", "flip": "flip", "tie change": "tie"}
    rows = range(len(comparison.pair))
    for row, token in zip(rows, comparison.details.tokens(rows), strict=True):
        name = f"t-0-{comparison.pair.sequence[row]}-{token.place.step}"
        expected = f"t {css_class(abs(token.delta))} {changes.get(token.change, '')}".strip()
        assert spans[name] == expected


def test_every_worst_token_links_to_its_place() -> None:
    found = Page(page(audit(), num_sequences=1))
    shown = {name for name in found.ids() if name.startswith("t-")}
    jumps = [a["href"] for tag, a in found.tags if tag == "a"]
    in_tables = [a["data-t"] for tag, a in found.tags if a.get("data-t")]
    assert jumps
    assert len(shown) == LENGTH
    # A token whose sequence is left out has its details, and no link.
    assert len(jumps) < len(in_tables)
    assert set(in_tables) <= set(found.data["tokens"])
    assert "7 other sequences not shown" in found.text
    assert "--html-sequences N" in found.text


def test_several_candidates_have_a_grid_and_a_section_each() -> None:
    found = Page(several())
    assert [name for name in found.ids() if name.startswith("p-")] == ["p-0", "p-1", "p-2"]
    grid = [a["href"] for tag, a in found.tags if (a.get("href") or "").startswith("#p-")]
    assert grid == ["#p-0", "#p-1", "#p-2"]
    assert "all 256 rows are bit-equal" in found.text
    assert found.text.count("Sequences in their text") == 2


def test_a_refused_candidate_is_named_at_the_top() -> None:
    data = audit()
    source = AuditSource(data)  # type: ignore[arg-type]
    summary, comparisons = compare_all(data, "record", ("noisy",))
    bad = InvalidPair(candidate="<b>bad", message="other tokens", hint=None)
    found = Page(render_html(replace(summary, invalid=(bad,)), [exhibit(source, *comparisons)]))
    before = found.text[: found.text.index("What was compared")]
    assert "INVALID  <b>bad: other tokens" in before


def test_hostile_text_is_visible_and_nothing_else() -> None:
    text = page(hostile_audit())
    found = Page(text)
    assert [tag for tag, _ in found.tags].count("script") == 2
    for data in HOSTILE:
        # As text of the page, and as text in its data.
        assert display_bytes(data) in found.text
        assert display_bytes(data) in found.data["texts"].values()
    surrogate = "\\xed\\xa0\\x80"
    assert f"<script>run</script>{surrogate}[bold]" in found.text
    assert f"</script>\\x00{surrogate}" in found.text
    assert f"<script>0</script>{surrogate}\\u202e" in found.text
    for character in "\x00\x1b\u202e\u2028\ufffd\ud800":
        assert character not in found.text
        assert character not in "".join(found.data["texts"].values())
    assert "49" not in found.data["texts"].values()


def test_data_cannot_end_its_script_element() -> None:
    text = script_json({"a": "</script><!-- & \u2028\u2029 \u00e9"})
    assert text.isascii()
    assert not set("<>&") & set(text)
    with pytest.raises(ValueError, match="JSON"):
        script_json([math.nan])


def test_values_that_are_not_finite_are_words() -> None:
    data = audit()
    table = data.tables["noisy"]
    values = table["logprob"].to_numpy().copy()
    values[5], values[6] = np.nan, -np.inf
    index = table.schema.get_field_index("logprob")
    data.tables["noisy"] = table.set_column(index, table.schema.field(index), [values])
    found = Page(page(data))
    assert [found.data["tokens"][f"0-0-{step}"][CANDIDATE] for step in (5, 6)] == ["nan", "-inf"]
    classes = {a["id"]: a["class"] for tag, a in found.tags if tag == "span" and a.get("id")}
    assert classes["t-0-0-5"] == "t dx"
    assert "2 candidate logprobs not finite" in found.text
    assert "NON-FINITE" in found.text


def test_a_run_with_nothing_but_logprobs_says_n_a() -> None:
    data = audit()
    values = data.tables["noisy"]["logprob"].to_numpy()
    data.tables["imported"] = run_table(data.sequences, {"logprob": values})
    found = Page(page(data, "imported"))
    token = found.data["tokens"]["0-0-3"]
    assert token[6] is None
    assert token[7] == "unknown"
    assert token[TOP_B] == []
    assert found.text.count("n/a") > 10


def test_a_baseline_without_best_tokens_has_no_confidence_chart() -> None:
    data = audit()
    values = data.tables["record"]["logprob"].to_numpy()
    data.tables["record"] = run_table(data.sequences, {"logprob": values})
    assert "Confidence: n/a" in Page(page(data)).text


def test_size_is_bounded_by_the_sequences_asked_for() -> None:
    data = audit(third=logits(0.3))
    small = len(page(data, "noisy", num_sequences=1))
    large = len(page(data, "noisy", num_sequences=8))
    assert (large - small) / (7 * LENGTH) < 600, "bytes a token"


def test_a_very_long_token_is_cut() -> None:
    data = audit()
    data.texts = dict.fromkeys(range(60), b"x" * 10000)
    assert max(map(len, Page(page(data)).data["texts"].values())) <= 200


def test_the_scale_has_a_class_for_every_size() -> None:
    assert css_class(0.0) == "d0"
    assert css_class(5e-324) == "d1"
    assert css_class(1e-5) == "d2"
    assert css_class(0.99) == "d9"
    assert css_class(1.0) == "d10"
    assert css_class(50.0) == "d11"
    assert css_class(math.nan) == css_class(math.inf) == "dx"
    style = (files("trace_audit.report") / "page" / "report.css").read_text(encoding="ascii")
    assert len(legend()) == len(EDGES) + 3
    assert [item.label for item in legend()[1:5]] == [">0", "1e-5", "1e-4", "0.001"]
    assert [item.label for item in legend()[-4:-1]] == ["0.316", "1", "3.16"]
    for item in legend():
        assert f".{item.css} {{" in style


def test_colors_can_be_told_apart_by_lightness_alone() -> None:
    style = (files("trace_audit.report") / "page" / "report.css").read_text(encoding="ascii")
    light, dark = style.split("@media screen and (prefers-color-scheme: dark)", 1)
    lightness = [
        [_luminance(color) for _, color in re.findall(r"--d(\d+): (#\w{6});", theme)]
        for theme in (light, dark)
    ]
    assert len(lightness[0]) == len(lightness[1]) == 11
    assert lightness[0] == sorted(lightness[0], reverse=True)
    assert lightness[1] == sorted(lightness[1])
    black, white = _luminance("#111111"), 1.0
    # The ink changes where the style sheet says: after the seventh class, and after the sixth.
    inks = ([black] * 7 + [white] * 4, [white] * 6 + [black] * 5)
    for theme, ink in zip(lightness, inks, strict=True):
        for paper, text in zip(theme, ink, strict=True):
            assert (max(paper, text) + 0.05) / (min(paper, text) + 0.05) >= 4.5


def _luminance(color: str) -> float:
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_charts_carry_their_numbers() -> None:
    comparison = one(audit(), "noisy")
    text = Page(page(audit())).text
    for bucket in comparison.summary.buckets:
        assert number(bucket.mean_abs_delta) in text
    assert "exactly 0" in text
    assert "0.99-0.999" in text


def test_an_interval_that_goes_on_above_the_plot_is_drawn_cut() -> None:
    buckets = tuple(
        PositionBucket(
            start=s,
            end=e,
            tokens=9,
            mean_abs_delta=0.01,
            interval=Interval(low=0, high=h, method="t"),
        )
        for s, e, h in ((10, 20, 0.012), (20, 40, 0.9))
    )
    chart = drift_chart(samples.pair(buckets=buckets))
    assert chart is not None
    whole, cut = chart.marks
    assert (whole.cut, cut.cut) == (False, True)
    assert cut.high == chart.top < whole.high
    assert "0.9" in cut.title
