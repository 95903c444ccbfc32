"""Processed logprobs, declared imports and their hints, as a user meets them."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.commands import SMALL, command, run, run_info, tokens, write_config

NUCLEUS = "half-mode=processed-top_p=0.3"
COLD = ["--set", "scoring.mode=processed", "--set", "temperature=0.7"]


@pytest.fixture(scope="module")
def scored(recorded, tmp_path_factory):
    """Runs that score colder, filtered, and processed by nothing."""
    base = tmp_path_factory.mktemp("scored")
    audit = Path(shutil.copytree(recorded, base / "audit"))
    plain = write_config(base / "p.toml", "plain", dtype="float32", attention_backend="eager")
    half = write_config(base / "h.toml", "half", dtype="bfloat16", attention_backend="eager")
    processed = ["--set", "scoring.mode=processed"]
    run("replay", audit, "--config", plain, *COLD, "--name", "cold")
    run("replay", audit, "--config", half, *COLD, "--name", "cold-half")
    run("replay", audit, "--config", plain, *processed, "--name", "neutral")
    both = ["--config", plain, "--config", half, *processed]
    run("replay", audit, *both, "--set", "top_p=0.3")
    return audit


def test_the_run_says_what_it_scored(scored):
    assert [run_info(scored, n)["logprobs"] for n in ("record", "cold", "neutral", NUCLEUS)] == [
        "raw", "processed", "raw", "processed",
    ]  # fmt: skip
    assert run_info(scored, "cold")["resolved_config"]["scoring"]["temperature"] == 0.7
    listed = {line.split()[0]: line for line in run("ls", scored).stdout.splitlines() if line}
    assert listed["cold"].endswith("temperature 0.7")
    assert listed[NUCLEUS].endswith("top_p 0.3")


def test_what_processes_nothing_is_the_record(scored):
    assert tokens(scored, "neutral").read_bytes() == tokens(scored, "record").read_bytes()
    options = ["--candidate", "neutral", "--profile", "bitwise", "--no-save"]
    assert "as it must be" in " ".join(run("diff", "report", scored, *options).stdout.split())


def test_the_cold_logprobs_are_those_of_colder_logits(scored):
    raw, cold = (pq.read_table(tokens(scored, name)) for name in ("record", "cold"))
    for column in ("token_id", "rank", "tie_count", "top_token_ids", "logits_hash"):
        assert raw[column].equals(cold[column]), column
    gaps = [
        np.diff(np.array(t["top_logprobs"].to_pylist(), dtype=np.float64), axis=1)
        for t in (raw, cold)
    ]
    assert np.abs(gaps[0] / 0.7 - gaps[1]).max() < 1e-4


def test_raw_against_processed_is_refused_in_one_sentence(scored):
    done = run("diff", "report", scored, "--candidate", "cold", "--no-save", code=4)
    assert "Run 'cold' has temperature 0.7 logprobs, the baseline has raw ones." in done.stderr
    assert "hint:" in done.stderr


def test_two_processed_runs_are_compared_with_kl_from_the_raw_records_support(scored):
    options = ["--baseline", "cold", "--candidate", "cold-half", "--no-save", "--format", "json"]
    (pair,) = json.loads(run("diff", "report", scored, *options).stdout)["pairs"]
    metrics = {metric["name"]: metric for metric in pair["metrics"]}
    assert metrics["kl.mean"]["value"] > 0
    assert metrics["kl.excess"]["value"] is None
    assert "the record has raw logprobs" in metrics["kl.excess"]["note"]
    assert pair["baseline"]["distribution"] == {"temperature": 0.7, "top_k": 0, "top_p": 1.0}
    assert not any("temperature" in line for line in pair["warnings"])


@pytest.mark.parametrize("layout", ["terminal", "html", "json"])
def test_filtered_runs_can_be_shown_in_every_format(scored, layout):
    options = ["--baseline", NUCLEUS.replace("half", "plain"), "--candidate", NUCLEUS]
    done = run("diff", "report", scored, *options, "--no-save", "--format", layout)
    assert "Warning" not in done.stderr
    assert "top_p" in done.stdout


def test_keys_without_an_effect_are_refused(audit, tmp_path):
    config = write_config(tmp_path / "c.toml", "x", attention_backend="eager")
    done = run("replay", audit, "--config", config, "--set", "temperature=0.7", code=2)
    assert 'scoring.temperature = 0.7 has no effect with scoring.mode = "raw"' in done.stderr
    assert 'scoring.mode = "processed"' in done.stderr


def rollout(recorded: Path, path: Path, values, **extra) -> Path:
    """The recorded trace as an import, with logprobs made of its own by `values`."""
    trace = pq.read_table(recorded / "trace.parquet").to_pylist()
    logprobs = pq.read_table(tokens(recorded, "record"))["logprob"].to_numpy().reshape(10, 12)
    with path.open("w") as file:
        for row, own in zip(trace, logprobs, strict=True):
            line = {
                "id": row["sequence_id"],
                "prompt_token_ids": row["prompt_token_ids"],
                "output_token_ids": row["output_token_ids"],
                "logprobs": [float(value) for value in values(own)],
            }
            file.write(json.dumps(line | extra) + "\n")
    return path


def import_of(model, path: Path, audit: Path):
    return run("record", model, "--prompts", path, "-o", audit, "--set", "device=cpu", *SMALL)


def test_an_import_says_how_it_was_scored_and_is_held_to_it(model, recorded, tmp_path):
    path = rollout(recorded, tmp_path / "r.jsonl", lambda x: x, scoring={"mode": "raw"})
    done = import_of(model, path, tmp_path / "raw")
    assert "how its logprobs were made" not in done.stderr
    assert "shifted" not in done.stderr
    info = run_info(tmp_path / "raw", "imported")
    assert (info["logprobs"], info["scoring"]["mode"]) == ("raw", "raw")
    run("diff", "report", tmp_path / "raw", "--profile", "rl")
    cold = {"mode": "processed", "temperature": 0.7}
    path = rollout(recorded, tmp_path / "c.jsonl", lambda x: x, scoring=cold)
    import_of(model, path, tmp_path / "cold")
    done = run("diff", "report", tmp_path / "cold", "--baseline", "imported", code=4)
    assert "the baseline has temperature 0.7 ones" in done.stderr


def test_an_import_that_says_nothing_and_is_shifted_is_told_and_not_gated(
    model, recorded, tmp_path
):
    path = rollout(recorded, tmp_path / "r.jsonl", lambda own: np.append(own[1:], -1.0))
    said = " ".join(import_of(model, path, tmp_path / "audit").stderr.split())
    assert "does not say how its logprobs were made" in said
    assert "The logprobs of the import look shifted by one" in said
    assert "the record run's of the next token" in said
    options = ["--baseline", "imported", "--no-save"]
    report = " ".join(run("diff", "report", tmp_path / "audit", *options).stdout.split())
    assert "imported does not say how its logprobs were made" in report
    assert "record's of the next token" in report
    done = subprocess.run(
        command("diff", "report", tmp_path / "audit", *options, "--profile", "rl"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 4
    assert "cannot be judged" in done.stderr
