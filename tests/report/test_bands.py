"""What is normal stands beside the value, with its source, in every format."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.diff.test_compare import audit
from tests.report.pages import page
from tests.report.samples import pair, report
from trace_audit.report.as_json import render_json
from trace_audit.report.markdown import render_markdown
from trace_audit.report.terminal import render_terminal


@pytest.mark.parametrize("width", [80, 160])
def test_the_terminal_prints_the_band_below_the_interval(width: int) -> None:
    lines = render_terminal(report(pair()), width=width, color=False).splitlines()
    place = next(i for i, line in enumerate(lines) if "normal: 8.84e-4 to 9.59e-4" in line)
    assert "[0.0110, 0.0137]" in lines[place - 1]
    text = " ".join(" ".join(lines).split())
    assert "normal for bfloat16 against float32: SmolLM2-135M" in text
    assert "docs/results/smollm2-135m-cpu-h200.md" in text


def test_markdown_and_html_print_it_too() -> None:
    markdown = render_markdown(report(pair()))
    assert "(normal: 8.84e-4 to 9.59e-4)" in markdown
    assert "normal for bfloat16 against float32" in markdown
    html = page(audit(), "noisy")
    assert "normal: 1.48e-6 to 3.44e-6" in html
    assert "normal for float32 on another backend or device" in html


def test_json_has_the_band_and_null_where_there_is_none() -> None:
    (one,) = json.loads(render_json(report(pair())))["pairs"]
    metrics = {m["name"]: m["band"] for m in one["metrics"]}
    assert metrics["kl.mean"]["low"] == 8.84e-4
    assert metrics["kl.mean"]["change"] == "bfloat16 against float32"
    assert metrics["tme"] is None


def test_without_a_band_nothing_is_said() -> None:
    bare = replace(pair(), metrics=tuple(replace(m, band=None) for m in pair().metrics))
    assert "normal" not in render_terminal(report(bare), width=80, color=False)
    assert "normal" not in render_markdown(report(bare))
