"""Tokens that the score mask leaves out touch nothing; groups are the unit of everything."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pyarrow as pa
import pytest

from tests.cli.test_gates import LENGTH, logits
from tests.diff.synthetic import FakeAudit, Logits, model_audit, run_info
from trace_audit.diff.compare import compare
from trace_audit.diff.source import AuditSource
from trace_audit.diff.summary import PairSummary

MASKED = slice(10, 20)


def masked(*, broken: bool, source: str = "greedy") -> FakeAudit:
    """Ten tokens of every sequence are a tool's; in a broken audit every run is wild there."""

    def run(sigma: float, seed: int) -> Logits:
        values = logits(sigma, seed).reshape(8, LENGTH, -1)
        if broken:
            values[:, MASKED] += 50 * np.random.default_rng(seed).normal(
                size=values[:, MASKED].shape
            )
        return values.reshape(8 * LENGTH, -1)

    mask = np.ones(LENGTH, dtype=bool)
    mask[MASKED] = False
    data = model_audit(
        {"record": logits(0), "base": run(0.1, 1), "base2": run(0.1, 2), "b": run(0.15, 3)},
        length=LENGTH,
        masks=dict.fromkeys(range(8), mask),
        source=source,
    )
    for name in ("base", "base2", "b"):
        data.infos[name] = run_info(name, dtype="bfloat16")
    data.infos["base2"] |= {"repeat_of": "base", "repeat_kind": "rerun"}
    if broken:
        table = data.tables["b"]
        index = table.schema.get_field_index("logprob")
        values = table["logprob"].to_numpy().copy().reshape(8, LENGTH)
        values[:, MASKED] = np.nan
        column = pa.array(values.ravel(), pa.float32())
        data.tables["b"] = table.set_column(index, table.schema.field(index), column)
    return data


def summary(data: FakeAudit) -> PairSummary:
    return compare(AuditSource(data), "base", "b", referee="record").summary  # type: ignore[arg-type]


def test_masked_tokens_touch_no_part_of_a_summary() -> None:
    clean, broken = summary(masked(broken=False)), summary(masked(broken=True))
    assert clean.tokens == 8 * (LENGTH - 10)
    assert clean.unscored == 80
    assert {m.name for m in clean.metrics if m.value is not None} > {"kl.excess", "abs.p99"}
    assert all(m.floor is not None for m in clean.metrics if m.name in ("kl.mean", "abs.mean"))
    for field in fields(PairSummary):
        assert getattr(clean, field.name) == getattr(broken, field.name), field.name


@pytest.mark.parametrize("name", ["clip.high", "kl.k3", "ess.share"])
def test_masked_tokens_touch_no_importance_ratio(name: str) -> None:
    found = []
    for broken in (False, True):
        data = masked(broken=broken, source="imported")
        data.tables["imported"] = data.tables["base"]
        metric = compare(AuditSource(data), "imported", "b").summary.metric(name)  # type: ignore[arg-type]
        assert metric is not None
        assert metric.value is not None
        found.append(metric)
    assert found[0] == found[1]


def test_every_interval_is_of_groups() -> None:
    """Two prompts of four samples each that share all of their noise: two units, not eight."""
    record = logits(0).reshape(8, LENGTH, -1)
    noise = np.random.default_rng(5).normal(0, 0.1, (2, LENGTH, 60)) * [[[1.0]], [[3.0]]]
    record[1:4], record[5:8] = record[0], record[4]
    candidate = record + np.repeat(noise, 4, axis=0)
    runs = {"record": record.reshape(-1, 60), "b": candidate.reshape(-1, 60)}
    alone = model_audit(runs, length=LENGTH)
    grouped = model_audit(runs, length=LENGTH, groups=list("aaaabbbb"))
    each, both = (
        compare(AuditSource(data), "record", "b").summary  # type: ignore[arg-type]
        for data in (alone, grouped)
    )
    assert (each.groups, both.groups) == (8, 2)
    for name in ("abs.mean", "kl.mean", "tme", "delta.rms", "abs.p50"):
        narrow, wide = each.metric(name), both.metric(name)
        assert narrow is not None
        assert wide is not None
        assert narrow.interval is not None
        assert wide.interval is not None
        assert narrow.value == pytest.approx(wide.value)
        widths = [i.high - i.low for i in (narrow.interval, wide.interval)]
        assert widths[1] > 2 * widths[0], name
