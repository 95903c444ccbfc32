"""Replays over a quantized KV cache, as a user runs and compares them."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.commands import run, run_info, tokens, write_config

STORED = "fp8_e4m3,fp8_e5m2,fp8_per_token_head,int8"


def report(audit: Path, baseline: str, candidate: str) -> dict:
    done = run(
        "diff", "report", audit, "--baseline", baseline, "--candidate", candidate,
        "--format", "json",
    )  # fmt: skip
    return json.loads(done.stdout)["pairs"][0]


def changed(pair: dict) -> list[str]:
    return [difference["key"] for difference in pair["config_differences"]]


@pytest.fixture
def replayed(audit: Path, tmp_path: Path) -> Path:
    """The audit with bfloat16 runs over three caches."""
    config = write_config(tmp_path / "b.toml", "b", dtype="bfloat16", attention_backend="sdpa")
    run("replay", audit, "--config", config, "--set", "kv_cache_dtype=auto,float32,fp8_e4m3")
    return audit


def test_runs_over_other_caches_differ_by_the_cache_alone(replayed):
    assert run_info(replayed, "record")["resolved_config"]["engine"]["kv_cache_dtype"] == "float32"
    auto = "b-kv_cache_dtype=auto"
    info = run_info(replayed, auto)
    assert info["resolved_config"]["engine"]["kv_cache_dtype"] == "bfloat16"
    assert info["backends"]["kv_cache"] == "bfloat16"
    fp8 = "b-kv_cache_dtype=fp8_e4m3"
    info = run_info(replayed, fp8)
    assert info["resolved_config"]["engine"]["kv_cache_dtype"] == "fp8_e4m3"
    assert info["backends"]["kv_cache"] == "fp8_e4m3"
    assert info["counters"]["nonfinite_rows"] == 0
    pair = report(replayed, auto, fp8)
    assert changed(pair) == ["engine.kv_cache_dtype"]
    assert not pair["bitwise"]
    ours, theirs = (pq.read_table(tokens(replayed, name)) for name in (auto, fp8))
    assert ours["token_id"].equals(theirs["token_id"])
    assert not ours["logprob"].equals(theirs["logprob"])
    shown = run("diff", "report", replayed, "--baseline", auto, "--candidate", fp8).stdout
    assert "engine.kv_cache_dtype" in shown
    # A cache that holds the model's numbers as they are must not change a bit.
    pair = report(replayed, auto, "b-kv_cache_dtype=float32")
    assert pair["bitwise"]
    assert pair["expected"]["reason"] == "both KV caches hold the model's numbers as they are"
    assert tokens(replayed, auto).read_bytes() == (
        tokens(replayed, "b-kv_cache_dtype=float32").read_bytes()
    )


def test_the_dry_run_counts_the_bytes_of_numbers_and_scales(audit, tmp_path):
    config = write_config(tmp_path / "b.toml", "b", dtype="bfloat16", num_kv_blocks=10)
    done = run(
        "replay", audit, "--config", config, "--dry-run",
        "--set", f"kv_cache_dtype=auto,float32,{STORED}",
    )  # fmt: skip
    # 10 blocks of 16 tokens, 4 layers, keys and values, 2 heads of 16 numbers.
    heads = 10 * 16 * 4 * 2 * 2
    got = [int(line.split()[-1]) for line in done.stdout.splitlines()[1:]]
    assert got == [heads * n for n in (32, 64, 16, 16, 20, 20)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("config", ["bf16-kv-fp8", "bf16-kv-int8"])
def test_an_8_bit_cache_moves_the_demo_model_from_its_first_tokens_on(tmp_path, config):
    root = Path(__file__).parent.parent
    prompts = tmp_path / "prompts.jsonl"
    lines = (root / "examples" / "prompts.jsonl").read_text().splitlines()[:2]
    prompts.write_text("\n".join(lines) + "\n")
    audit = tmp_path / "audit"
    run("record", "demo", "--prompts", prompts, "-o", audit, "--max-tokens", 24,
        "--config", root / "configs" / "bf16-sdpa.toml", "--set", "device=cpu")  # fmt: skip
    for name in ("bf16-sdpa", config):
        path = root / "configs" / f"{name}.toml"
        run("replay", audit, "--config", path, "--set", "device=cpu", "--name", name)
    assert report(audit, "record", "bf16-sdpa")["bitwise"]
    pair = report(audit, "bf16-sdpa", config)
    assert changed(pair) == ["engine.kv_cache_dtype"]
    onset = pair["structure"]["onset"]
    assert onset["persistent"]
    assert onset["position"] <= onset["first"] + 16
    shown = run("diff", "report", audit, "--baseline", "bf16-sdpa", "--candidate", config).stdout
    assert "onset" in shown
