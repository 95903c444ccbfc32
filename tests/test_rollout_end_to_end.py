"""A rollout against a trainer, as an RL engineer audits it: import, one pass, verdict."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.commands import SMALL, command, run, run_info, tokens, write_config
from tests.tiny import save_tiny, save_tokenizer

EXPORT = Path(__file__).parent.parent / "examples" / "export_rollout.py"
PREFILL = ["--set", "device=cpu", "--set", "path=prefill", *SMALL]


@dataclass(frozen=True)
class Rollout:
    """What an engine sampled, line by line, and the audit of a healthy trainer."""

    lines: list[dict[str, Any]]
    audit: Path


@pytest.fixture(scope="module")
def rollout(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Rollout:
    directory = tmp_path_factory.mktemp("rollout")
    prompts = directory / "prompts.jsonl"
    # Two samples of each of four prompts.
    write(prompts, [{"id": f"{i}", "group_id": f"{i // 2}", "prompt": "why " * (i // 2 + 1)}
                    for i in range(8)])  # fmt: skip
    run("record", model, "--prompts", prompts, "-o", directory / "engine", "--max-tokens", 24,
        "--temperature", 1, "--ignore-eos", "--set", "device=cpu", *SMALL)  # fmt: skip
    exported = directory / "rollout.jsonl"
    runpy.run_path(str(EXPORT))["main"](directory / "engine", exported)
    lines = [json.loads(line) for line in exported.read_text().splitlines()]
    return Rollout(lines, trained(model, lines, directory))


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def trained(model: Path, lines: list[dict[str, Any]], directory: Path) -> Path:
    """The audit of a rollout, its record run being the trainer's pass."""
    path = write(directory / "given.jsonl", lines)
    run("record", model, "--prompts", path, "-o", directory / "audit", *PREFILL)
    return directory / "audit"


def test_a_healthy_rollout_passes(rollout):
    done = run("diff", "report", rollout.audit, "--profile", "rl", "--no-save")
    assert "record against imported, profile rl" in done.stdout
    assert "PASS" in done.stdout
    assert "imported states no configuration" in " ".join(done.stdout.split())
    assert "config keys differ" not in done.stdout


def test_a_pass_is_told_by_every_row_and_by_run_json(rollout):
    table = pq.read_table(tokens(rollout.audit, "record"))
    assert set(table["phase"].to_pylist()) == {"prefill"}
    assert set(table["launch_requests"].to_pylist()) == {1}
    for sequence in pq.read_table(rollout.audit / "trace.parquet").to_pylist():
        launch = len(sequence["prompt_token_ids"]) + 24 - 1
        rows = [r for r in table.select(["sequence_id", "launch_tokens"]).to_pylist()
                if r["sequence_id"] == sequence["sequence_id"]]  # fmt: skip
        assert {r["launch_tokens"] for r in rows} == {launch}
    info = run_info(rollout.audit, "record")
    assert info["counters"]["steps"] == 8
    assert info["counters"]["tokens"] == 8 * 24
    assert info["counters"]["preemptions"] == 0
    assert info["backends"]["trace_replay"] == "none"
    assert info["model_check"]["max_abs_delta_logprob"] < 5e-5


def test_shards_have_no_part_in_the_numbers_of_a_pass(rollout, tmp_path):
    audit = Path(shutil.copytree(rollout.audit, tmp_path / "audit"))
    config = write_config(
        tmp_path / "c.toml", "pass", dtype="float32", attention_backend="eager", path="prefill"
    )
    run("replay", audit, "--config", config, "--set", "shard_size=3,8")
    ours = [pq.read_table(tokens(audit, f"pass-shard_size={n}")) for n in (3, 8)]
    assert ours[0].equals(ours[1])
    assert ours[0].equals(pq.read_table(tokens(audit, "record")))


def test_logprobs_of_another_temperature_fail(rollout, model, tmp_path):
    lines = [line | {"logprobs": at_temperature(model, line, 0.7)} for line in rollout.lines]
    audit = trained(model, lines, tmp_path)
    done = judged(audit, 1, "--profile", "rl")
    assert "FAIL  record against imported" in done


def test_other_weights_fail(rollout, model, tmp_path):
    audit = Path(shutil.copytree(rollout.audit, tmp_path / "audit"))
    other = save_tokenizer(save_tiny(tmp_path / "other", "llama", scale=1.6))
    config = write_config(
        tmp_path / "c.toml", "stale", dtype="float32", attention_backend="eager", path="prefill"
    )
    run("replay", audit, "--config", config, "--model", other)
    report = judged(audit, 1, "--profile", "rl", "--candidate", "stale")
    assert "FAIL  stale against imported" in report


def judged(audit: Path, code: int, *arguments: str) -> str:
    done = subprocess.run(
        command("diff", "report", audit, *arguments), capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_a_rollout_that_does_not_say_how_it_was_scored_is_reported_and_not_gated(
    rollout, model, tmp_path
):
    lines = [{k: v for k, v in line.items() if k != "scoring"} for line in rollout.lines]
    audit = trained(model, lines, tmp_path)
    run("diff", "report", audit, "--baseline", "imported")
    gated = judged(audit, 4, "--profile", "rl")
    assert "INVALID" in gated
    assert "how its logprobs were made" in " ".join(gated.split())


def at_temperature(model: Path, line: dict[str, Any], temperature: float) -> list[float]:
    """What an engine reports that divides its logits before the softmax."""
    import torch
    from transformers import AutoModelForCausalLM

    ids = torch.tensor([line["prompt_token_ids"] + line["output_token_ids"]])
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(model)(ids).logits[0, :-1] / temperature
    logprobs = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]
    return logprobs[len(line["prompt_token_ids"]) - 1 :].tolist()


def test_a_tool_token_needs_no_logprob_and_shifted_logprobs_are_told(rollout, model, tmp_path):
    lines = json.loads(json.dumps(rollout.lines[:4]))
    for line in lines:
        line["score_mask"] = [not 5 <= i < 9 for i in range(24)]
        line["logprobs"] = [
            x if scored else None
            for x, scored in zip(line["logprobs"], line["score_mask"], strict=True)
        ]
    audit = trained(model, lines, tmp_path)
    given = pq.read_table(tokens(audit, "imported"))["logprob"].to_numpy()
    assert np.isnan(given).sum() == 4 * 4
    done = run("diff", "report", audit, "--profile", "rl")
    assert "80 scored tokens of 4 sequences" in done.stdout
    for line in lines:
        line["logprobs"] = [-1.0, *(x or -1.0 for x in line["logprobs"][:-1])]
    path = write(tmp_path / "shifted.jsonl", lines)
    done = run("record", model, "--prompts", path, "-o", tmp_path / "shifted", *PREFILL)
    assert "look shifted" in done.stderr
    assert "of the previous token" in done.stderr


def test_what_cannot_be_judged_or_scored_is_refused(rollout, model, recorded, tmp_path):
    assert "greedy" in run("diff", "report", recorded, "--profile", "rl", code=2).stderr
    dropped = ("logprobs", "scoring")
    lines = [{k: v for k, v in line.items() if k not in dropped} for line in rollout.lines[:2]]
    audit = trained(model, lines, tmp_path)
    refused = run("diff", "report", audit, "--profile", "rl", code=2)
    assert "the prompts file gave none" in refused.stderr
    path = write(tmp_path / "p.jsonl", [*lines, {"prompt": "free"}])
    refused = run("record", model, "--prompts", path, "-o", tmp_path / "x", *PREFILL, code=2)
    assert "line 3: there are no output_token_ids" in refused.stderr
    assert 'record with path = "decode"' in refused.stderr
    assert not (tmp_path / "x").exists()
