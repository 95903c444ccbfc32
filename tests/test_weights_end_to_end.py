"""Quantized and compiled replays, as a user runs and compares them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.commands import command, run, run_info, tokens, write_config

QUANTIZATIONS = ("int8_weight_only", "int4_weight_only", "fp8")


def report(audit: Path, candidate: str) -> dict:
    done = run("diff", "report", audit, "--candidate", candidate, "--format", "json")
    return json.loads(done.stdout)["pairs"][0]


@pytest.fixture
def eager(tmp_path: Path) -> Path:
    return write_config(tmp_path / "e.toml", "e", attention_backend="eager")


def test_quantized_replays_differ_by_the_weights_alone(audit, eager):
    values = ",".join(QUANTIZATIONS)
    run("replay", audit, "--config", eager, "--set", f"quantization=none,{values}")
    sizes = {}
    for value in ("none", *QUANTIZATIONS):
        name = f"e-quantization={value}"
        backends = run_info(audit, name)["backends"]
        assert backends["quantization"] == value
        assert backends["checkpoint"] == "plain"
        assert (backends["linear"] == "fp8-float32") == (value == "fp8")
        pair = report(audit, name)
        changed = [difference["key"] for difference in pair["config_differences"]]
        assert changed == (["engine.quantization"] if value != "none" else [])
        assert pair["bitwise"] == (value == "none")
        kl = [metric["value"] for metric in pair["metrics"] if metric["name"] == "kl.mean"]
        sizes[value] = kl[0] if kl else 0.0
    assert sizes["none"] == 0
    assert 0 < sizes["int8_weight_only"] < sizes["fp8"] < sizes["int4_weight_only"]
    shown = run("diff", "report", audit, "--candidate", "e-quantization=int4_weight_only").stdout
    assert "engine.quantization" in shown
    assert "weights in 4 bits" in shown
    for value, profile, code in (("int8_weight_only", "w8", 0), ("int4_weight_only", "w4", 1)):
        judged = subprocess.run(
            command("diff", "report", audit, "--profile", profile,
                    "--candidate", f"e-quantization={value}"),
            capture_output=True, text=True, check=False, timeout=240,
        )  # fmt: skip
        assert "kl.mean" in judged.stdout
        assert judged.returncode == code, judged.stdout


def test_a_quantized_replay_is_refused_where_it_cannot_be(audit, eager):
    before = sorted((audit / "runs").iterdir())
    done = run(
        "replay", audit, "--config", eager, "--set", "quantization=fp8",
        "--set", "tensor_parallel_size=2", code=2,
    )  # fmt: skip
    assert "a rank's shard would have scales of its own" in done.stderr
    done = run(
        "replay", audit, "--config", eager, "--set", "compile=true",
        "--set", "pipeline_parallel_size=2", code=2,
    )  # fmt: skip
    assert "compile = true compiles a model that is whole" in done.stderr
    done = run(
        "replay", audit, "--config", eager, "--set", "compile=true", code=2, CXX="no-such-compiler"
    )  # fmt: skip
    assert "needs a C++ compiler on a CPU" in done.stderr
    assert sorted((audit / "runs").iterdir()) == before


def test_pipeline_stages_quantize_their_own_layers_alike(audit, eager):
    run(
        "replay", audit, "--config", eager, "--set", "quantization=int4_weight_only",
        "--set", "parallel.backend=emulated", "--set", "pipeline_parallel_size=1,2",
    )  # fmt: skip
    one, two = (
        f"e-quantization=int4_weight_only-backend=emulated-pipeline_parallel_size={n}"
        for n in (1, 2)
    )
    assert tokens(audit, one).read_bytes() == tokens(audit, two).read_bytes()
    assert run_info(audit, two)["backends"]["quantization"] == "int4_weight_only"


@pytest.mark.timeout(900)
def test_a_compiled_replay_repeats_itself_and_is_named(audit, eager):
    run("replay", audit, "--config", eager, "--set", "compile=true", "--repeat", 2)
    first, again = sorted(p.name for p in (audit / "runs").iterdir() if p.name != "record")
    assert tokens(audit, first).read_bytes() == tokens(audit, again).read_bytes()
    assert run_info(audit, first)["backends"]["compile"] == "inductor, decoder layers"
    pair = report(audit, first)
    assert [difference["key"] for difference in pair["config_differences"]] == ["engine.compile"]
    ours, theirs = (
        pq.read_table(tokens(audit, name))["logprob"].to_numpy() for name in (first, "record")
    )
    assert 0 < abs(ours - theirs).max() < 5e-5
