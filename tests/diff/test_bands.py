"""What is normal: the band follows the change between two runs, and never judges."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.report.samples import identity
from trace_audit.diff.bands import BANDS, with_bands
from trace_audit.diff.catalog import CATALOG, metric
from trace_audit.diff.estimators import Estimate
from trace_audit.diff.metric import Band
from trace_audit.diff.summary import RunIdentity

ROOT = Path(__file__).parent.parent.parent


def run(**engine: object) -> RunIdentity:
    return identity("run", **{"quantization": "none", "kv_cache_dtype": "auto", **engine})


def band(name: str, baseline: RunIdentity, candidate: RunIdentity) -> Band | None:
    one = metric(name, Estimate(value=0.1))
    return with_bands([one], baseline, candidate)[0].band


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        ({}, {"attention_backend": "sdpa"}, "float32 on another backend or device"),
        ({}, {"dtype": "bfloat16"}, "bfloat16 against float32"),
        ({}, {"dtype": "float16"}, "float16 against float32"),
        (
            {"dtype": "bfloat16"},
            {"dtype": "bfloat16", "attention_backend": "sdpa"},
            "bfloat16 with sums in another order",
        ),
        ({}, {"dtype": "bfloat16", "kv_cache_dtype": "int8"}, "KV cache in 8 bits"),
        (
            {},
            {"quantization": "int8_weight_only", "kv_cache_dtype": "fp8_e4m3"},
            "weights in 8 bits",
        ),
        ({"quantization": "fp8"}, {"quantization": "int4_weight_only"}, "weights in 4 bits"),
    ],
)
def test_the_coarsest_change_between_two_runs_decides(
    before: dict[str, Any], after: dict[str, Any], change: str
) -> None:
    found = band("kl.mean", run(**before), run(**after))
    assert found is not None
    assert found.change == change


def test_nothing_is_said_of_changes_nobody_measured() -> None:
    assert band("kl.mean", run(dtype="float16"), run(dtype="bfloat16")) is None
    assert band("kl.mean", run(dtype="bfloat16"), run(dtype="float32")) is None
    unknown = replace(run(), resolved={})
    assert band("kl.mean", unknown, unknown) is None
    assert band("delta.mean", run(), run(dtype="bfloat16")) is None


def test_a_band_changes_nothing_but_itself() -> None:
    one = metric("kl.mean", Estimate(value=7.0))
    (banded,) = with_bands([one], run(), run(dtype="bfloat16"))
    assert replace(banded, band=None) == one


@pytest.mark.parametrize("kind", BANDS, ids=lambda kind: kind.change)
def test_bands_are_of_metrics_that_exist_and_have_a_source(kind: Any) -> None:
    for name, (low, high, source) in kind.bands.items():
        assert name in CATALOG
        assert 0 <= low <= high
        assert source


@pytest.mark.parametrize("kind", BANDS, ids=lambda kind: kind.change)
def test_figures_of_our_own_are_in_the_page_that_is_named(kind: Any) -> None:
    for low, high, source in kind.bands.values():
        page = re.search(r"docs/\S+\.md", source)
        if page is None:
            continue
        words = (ROOT / page.group()).read_text(encoding="utf-8").replace("(", " ").split()
        figures = {float(word) for word in words if re.fullmatch(r"\d+(\.\d+)?(e-\d+)?", word)}
        assert {low, high} <= figures
