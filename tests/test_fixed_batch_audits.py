"""`fixed_batch` as a user meets it: files that are equal, counts in run.json, words in reports."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.commands import command, run, run_info, tokens, write_config

KEYS = {"dtype": "float32", "attention_backend": "sdpa", "fixed_batch": True, "block_size": 4}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("config") / "fixed.toml", "fixed", **KEYS)


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory, recorded: Path, config: Path) -> Path:
    """An audit with an unpressured run; each test adds runs of other names."""
    copy = Path(shutil.copytree(recorded, tmp_path_factory.mktemp("fixed") / "audit"))
    replay(copy, config, "ample")
    return copy


def replay(audit: Path, config: Path, name: str, *options: object) -> bytes:
    run("replay", audit, "--config", config, "--name", name, *options)
    return tokens(audit, name).read_bytes()


def pair(audit: Path, baseline: str, candidate: str) -> dict:
    done = run(
        "diff", "report", audit, "--baseline", baseline, "--candidate", candidate,
        "--format", "json", "--no-save",
    )  # fmt: skip
    return json.loads(done.stdout)["pairs"][0]


def test_pressure_changes_no_byte(audit, config):
    assert run_info(audit, "ample")["counters"]["preemptions"] == 0
    # 29 blocks of 4 hold the longest sequence of 100 tokens and a little more.
    pressed = replay(audit, config, "pressed", "--set", "num_kv_blocks=29")
    counters = run_info(audit, "pressed")["counters"]
    assert counters["preemptions"] > 0
    assert counters["swapped_blocks"] > 0
    assert pressed == tokens(audit, "ample").read_bytes()
    found = pair(audit, "ample", "pressed")
    assert found["bitwise"]
    assert not found["fault"]
    assert [key["key"] for key in found["expected"]["keys"]] == ["engine.num_kv_blocks"]


def test_shards_and_company_change_no_bit(audit, config):
    replay(audit, config, "shards", "--set", "shard_size=3")
    table = pq.read_table(tokens(audit, "shards"))
    assert table.equals(pq.read_table(tokens(audit, "ample")))
    replay(audit, config, "some", "--only", "chat", "--only", "long")
    found = pair(audit, "ample", "some")
    assert found["bitwise"]
    assert "no sequence depends on the others" in found["expected"]["reason"]


def test_recomputing_keeps_the_tokens_and_owes_no_bit(audit, config):
    options = ("--set", "num_kv_blocks=29", "--set", "preemption=recompute")
    replay(audit, config, "recomputed", *options)
    counters = run_info(audit, "recomputed")["counters"]
    assert counters["preemptions"] > 0
    assert counters["recomputed_tokens"] > 0
    tables = [pq.read_table(tokens(audit, name)) for name in ("ample", "recomputed")]
    assert tables[0]["token_id"].equals(tables[1]["token_id"])
    found = pair(audit, "ample", "recomputed")
    assert found["expected"] is None
    assert not found["bitwise"]


def test_two_audits_of_several_ranks_at_once(audit, recorded, tmp_path, config):
    """Case 33: nothing that both would take, and the bytes of one alone."""
    other = Path(shutil.copytree(recorded, tmp_path / "other"))
    ranks = ["--set", "tensor_parallel_size=2", "--set", "parallel.backend=process"]
    started = [
        subprocess.Popen(
            command("replay", where, "--config", config, "--name", "ranks", *ranks),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for where in (audit, other)
    ]
    for process in started:
        _, said = process.communicate(timeout=240)
        assert process.returncode == 0, said
    assert tokens(audit, "ranks").read_bytes() == tokens(other, "ranks").read_bytes()
