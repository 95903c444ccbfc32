"""Case 1: KV in 8 bits moves every token from absolute position 97 on, and the report says so."""

from __future__ import annotations

import numpy as np
import pytest

from tests.diff.synthetic import PROMPT_LENGTH, FakeAudit, compare_all, model_audit, run_info
from trace_audit.report.as_json import render_json
from trace_audit.report.markdown import render_markdown
from trace_audit.report.terminal import render_terminal

LENGTH = 160
ONSET = 97


@pytest.fixture(scope="module")
def data() -> FakeAudit:
    generator = np.random.default_rng(0)
    record = generator.normal(0, 2.5, (4 * LENGTH, 60))
    candidate = record.copy()
    late = np.tile(np.arange(LENGTH) + PROMPT_LENGTH >= ONSET, 4)
    candidate[late] += generator.normal(0, 0.2, (int(late.sum()), 60))
    audit = model_audit({"record": record, "kv8": candidate}, length=LENGTH)
    audit.infos["kv8"] = run_info("kv8", kv_cache_dtype="int8")
    return audit


def summary_of(data: FakeAudit):  # type: ignore[no-untyped-def]
    return compare_all(data, "record", ["kv8"])[0]


@pytest.mark.parametrize("width", [80, 160])
def test_the_terminal_names_the_onset(data: FakeAudit, width: int) -> None:
    text = " ".join(render_terminal(summary_of(data), width=width, color=False).split())
    assert "onset: position 97, persistent" in text
    assert "first differing bit: position 97" in text
    assert "confidence 0.5-0.9" in text


def test_markdown_and_json_name_it_too(data: FakeAudit) -> None:
    summary = summary_of(data)
    assert "- onset: position 97, persistent" in render_markdown(summary)
    assert '"position": 97' in render_json(summary)
    structure = summary.pairs[0].structure
    assert structure is not None
    assert structure.drift is not None
    assert structure.drift.interval is not None
    assert structure.drift.interval.low > 0
