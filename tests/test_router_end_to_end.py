"""A mixture of experts, recorded in float32 and replayed in bf16, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.commands import SMALL, run, run_info, tokens, write_config
from tests.tiny import random_prompts, save_tiny, save_tokenizer

CALLS_PER_TOKEN = 3  # layers with a router, of four


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("moe")
    model = save_tokenizer(save_tiny(directory / "model", "qwen3-moe"))
    lines = [{"prompt_token_ids": ids} for ids in random_prompts([12] * 12)]
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    audit = directory / "audit"
    run(
        "record", model, "--prompts", prompts, "-o", audit, "--max-tokens", 32, "--ignore-eos",
        "--set", "device=cpu", *SMALL,
    )  # fmt: skip
    for name, changes in {"same": {}, "bf16": {"dtype": "bfloat16"}}.items():
        config = {"attention_backend": "eager", **changes}
        run("replay", audit, "--config", write_config(directory / f"{name}.toml", name, **config))
    return audit


def report(audit: Path, candidate: str) -> dict:
    done = run("diff", "report", audit, "--candidate", candidate, "--format", "json")
    return json.loads(done.stdout)["pairs"][0]


def test_a_healthy_rerun_chooses_the_same_experts(recorded: Path) -> None:
    pair = report(recorded, "same")
    assert pair["bitwise"]
    assert pair["router"]["changed"] == 0
    assert pair["router"]["calls"] == 12 * 32 * CALLS_PER_TOKEN
    assert tokens(recorded, "same").read_bytes() == tokens(recorded, "record").read_bytes()


def test_bf16_flips_routers_and_the_report_splits_delta_by_it(recorded: Path) -> None:
    assert run_info(recorded, "bf16")["routing"] == {
        "layers": [0, 2, 3], "num_experts": 4, "reason": None,
    }  # fmt: skip
    a, b = (pq.read_table(tokens(recorded, name)) for name in ("record", "bf16"))
    choices = [table["expert_ids"].to_pylist() for table in (a, b)]
    changed = [
        sum(set(x[i : i + 2]) != set(y[i : i + 2]) for i in (0, 2, 4))
        for x, y in zip(*choices, strict=True)
    ]
    delta = abs(b["logprob"].to_numpy().astype(float) - a["logprob"].to_numpy())
    metrics = {m["name"]: m for m in report(recorded, "bf16")["metrics"]}
    calls = metrics["router.disagreement"]
    assert calls["value"] == pytest.approx(sum(changed) / (3 * len(changed)))
    assert 0 < calls["value"] < 0.1
    assert calls["interval"]["low"] > 0
    moved = [d for d, count in zip(delta, changed, strict=True) if count]
    others = [d for d, count in zip(delta, changed, strict=True) if not count]
    assert metrics["router.abs_changed"]["value"] == pytest.approx(sum(moved) / len(moved))
    assert metrics["router.abs_same"]["value"] == pytest.approx(sum(others) / len(others))
    # The few tokens with other experts differ by much more than bf16 alone makes of the others.
    assert metrics["router.abs_changed"]["value"] > 3 * metrics["router.abs_same"]["value"]
    assert metrics["router.abs_share"]["value"] > 3 * metrics["router.tokens"]["value"]


def test_pipeline_stages_store_the_whole_models_choices(recorded: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "pp.toml", "pp", attention_backend="eager")
    run(
        "replay", recorded, "--config", config, "--set", "parallel.backend=process",
        "--set", "pipeline_parallel_size=2",
    )  # fmt: skip
    name = next(p.name for p in (recorded / "runs").iterdir() if p.name.startswith("pp"))
    assert run_info(recorded, name)["routing"]["layers"] == [0, 2, 3]
    assert tokens(recorded, name).read_bytes() == tokens(recorded, "record").read_bytes()
