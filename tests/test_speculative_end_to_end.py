"""Speculative decoding from the command line: what is stored, and what a report says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from tests.commands import SMALL, run, run_info, tokens, write_config
from trace_audit.acceptance import acceptance

KEPT = ["sequence_id", "step", "token_id", "position", "rank"]


def replayed(audit: Path, config: Path, name: str, *sets: str) -> dict:
    pairs = [part for key in sets for part in ("--set", key)]
    run("replay", audit, "--config", config, "--name", name, *pairs)
    return run_info(audit, name)


def test_drafts_change_launches_and_nothing_that_was_recorded(audit: Path, model: Path) -> None:
    config = write_config(audit.parent / "config.toml", "x", attention_backend="eager")
    by_ngram = replayed(audit, config, "ngram", "method=ngram")
    by_model = replayed(
        audit, config, "model", "method=draft_model", f"draft_model={model}",
        "rejection=probabilistic",
    )  # fmt: skip
    record = pq.read_table(tokens(audit, "record"))
    for name in ("ngram", "model"):
        table = pq.read_table(tokens(audit, name))
        assert table.select(KEPT).equals(record.select(KEPT))
        worst = pc.max(pc.abs(pc.subtract(table["logprob"], record["logprob"]))).as_py()
        assert worst < 1e-4
    phases = set(pq.read_table(tokens(audit, "model"))["phase"].to_pylist())
    assert phases == {"prefill", "verify", "decode"}
    counters = by_model["counters"]
    assert counters["accepted_draft_tokens"] == counters["draft_tokens"] > 0
    assert counters["tokens"] == record.num_rows
    # Ten sequences in three shards: the counters are added up, and the shares are of the sums.
    assert by_model["acceptance"] == acceptance(counters)
    assert by_model["acceptance"]["acceptance_rate"] == 1.0
    assert by_model["draft_model_fingerprint"] == by_model["model_fingerprint"]
    assert by_ngram["draft_model_fingerprint"] is None
    assert by_ngram["counters"]["steps"] > counters["steps"]
    assert run_info(audit, "record")["acceptance"] is None
    report = json.loads(
        run("diff", "report", audit, "--candidate", "model", "--format", "json", "--no-save").stdout
    )
    (pair,) = report["pairs"]
    assert pair["candidate"]["acceptance_rate"] == 1.0
    changed = {difference["key"] for difference in pair["config_differences"]}
    assert "speculative.method" in changed
    assert not any("keys differ" in warning for warning in pair["warnings"])
    run("verify", audit)


def test_a_record_with_drafts_is_the_record_without(
    recorded: Path, model: Path, prompts: Path, tmp_path: Path
) -> None:
    run(
        "record", model, "--prompts", prompts, "-o", tmp_path / "a", "--max-tokens", 12,
        "--ignore-eos", "--set", "device=cpu", *SMALL, "--set", "method=draft_model",
        "--set", f"draft_model={model}",
    )  # fmt: skip
    traces = [
        pq.read_table(audit / "trace.parquet")["output_token_ids"].to_pylist()
        for audit in (recorded, tmp_path / "a")
    ]
    assert traces[0] == traces[1]
    assert run_info(tmp_path / "a", "record")["acceptance"]["mean_acceptance_length"] > 2


def test_a_draft_model_that_is_not_there_is_refused(audit: Path) -> None:
    config = write_config(audit.parent / "config.toml", "x")
    sets = (
        "--name",
        "x",
        "--set",
        "method=draft_model",
        "--set",
        f"draft_model={audit / 'nothing'}",
    )
    done = run("replay", audit, "--config", config, *sets, code=2)
    assert "nothing does not exist" in " ".join(done.stderr.split())


@pytest.mark.parametrize("counters", [{}, {"drafts": 0, "draft_tokens": 0}, {"tokens": 5}])
def test_without_drafts_there_is_no_rate(counters: dict[str, int]) -> None:
    assert acceptance(counters) is None


def test_shares_are_of_drafts_and_of_draft_tokens() -> None:
    counters = {
        "drafts": 4, "draft_tokens": 10, "accepted_draft_tokens": 5,
        "accepted_at_1": 3, "accepted_at_2": 2, "accepted_at_3": 0,
    }  # fmt: skip
    assert acceptance(counters) == {
        "acceptance_rate": 0.5,
        "mean_acceptance_length": 2.25,
        "acceptance_rate_per_position": [0.75, 0.5, 0.0],
    }
