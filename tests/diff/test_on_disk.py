"""The whole command on an audit that the storage layer wrote."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.diff.synthetic import (
    PROMPT_LENGTH,
    Logits,
    best_ids,
    draw_support,
    make_sequences,
    run_info,
    run_table,
    statistics,
)
from trace_audit.cli.main import run
from trace_audit.storage.audit_dir import AuditDir
from trace_audit.storage.imported import ImportedSequence, imported_tokens
from trace_audit.storage.record_writer import RecordInfo, TracePrompt, start_record
from trace_audit.storage.schema import SHARD_SCHEMA

SEQUENCES, LENGTH, VOCABULARY = 4, 24, 60


def record_logits() -> Logits:
    return np.random.default_rng(0).normal(0, 2.5, (SEQUENCES * LENGTH, VOCABULARY))


@pytest.fixture
def audit(tmp_path: Path) -> Path:
    """Runs: record, imported, same (bit-equal), noisy and part (sequences s1 and s2 only).

    All are of one configuration, so that what differs in noisy is a fault.
    """
    path = tmp_path / "audit"
    record = record_logits()
    noisy = record + np.random.default_rng(1).normal(0, 0.1, record.shape)
    tokens, support = best_ids(record, 1)[:, 0], draw_support(record, np.random.default_rng(2))
    sequences = make_sequences(
        tokens.reshape(SEQUENCES, LENGTH), support.reshape(SEQUENCES, LENGTH, -1)
    )
    tables = {
        name: run_table(sequences, statistics(logits, tokens, support))
        for name, logits in (("record", record), ("same", record), ("noisy", noisy))
    }
    opened = _record(path, tables["record"], support)
    for name in ("same", "noisy"):
        _write_run(opened, name, tables[name], run_info(name))
    _write_run(
        opened,
        "part",
        tables["noisy"].slice(LENGTH, 2 * LENGTH),
        {**run_info("part"), "subset": ["s1", "s2"]},
    )
    return path


def _record(path: Path, table: pa.Table, support: np.ndarray) -> AuditDir:
    shard = table.append_column(
        SHARD_SCHEMA.field("support_token_ids"),
        pa.array(support.tolist(), SHARD_SCHEMA.field("support_token_ids").type),
    )
    prompts = [
        TracePrompt(
            sequence_id=f"s{i}",
            group_id=f"s{i}",
            prompt_token_ids=np.arange(PROMPT_LENGTH, dtype=np.int32),
            source="greedy",
        )
        for i in range(SEQUENCES)
    ]
    info = RecordInfo(
        model="tiny",
        model_path="/models/tiny",
        model_revision=None,
        model_fingerprint="m" * 64,
        tokenizer_fingerprint=None,
        prompts_sha256="p" * 64,
        vocabulary_size=VOCABULARY,
        tokenizer_size=None,
        seed=0,
        sampling={"temperature": 0.0},
    )
    with start_record(path, job_digest="r", num_shards=1, force=False) as writer:
        writer.write_shard(
            0, shard, counters={}, finish_reasons=["length"] * SEQUENCES, engine_seconds=1.0
        )
        writer.add_imported_run(_imported(table), {"model": "elsewhere"})
        return writer.finish(
            info,
            prompts,
            token_bytes=[b"[bold]\x1b[31m %d" % i for i in range(VOCABULARY)],
            special=[False] * VOCABULARY,
            run_info=run_info("record"),
        )


def _imported(table: pa.Table) -> pa.Table:
    logprobs = table["logprob"].to_numpy().reshape(SEQUENCES, LENGTH) - 0.01
    tokens = table["token_id"].to_numpy().reshape(SEQUENCES, LENGTH)
    return imported_tokens(
        [
            ImportedSequence(
                sequence_index=i,
                sequence_id=f"s{i}",
                prompt_length=PROMPT_LENGTH,
                token_ids=tokens[i].tolist(),
                logprobs=logprobs[i].tolist(),
            )
            for i in range(SEQUENCES)
        ]
    )


def _write_run(audit: AuditDir, name: str, table: pa.Table, info: dict[str, object]) -> None:
    shard = table.append_column(
        SHARD_SCHEMA.field("support_token_ids"),
        pa.nulls(len(table), SHARD_SCHEMA.field("support_token_ids").type),
    )
    reasons = ["length"] * (len(table) // LENGTH)
    with audit.run_writer(name, job_digest=name, num_shards=1, force=False) as writer:
        writer.write_shard(0, shard, counters={}, finish_reasons=reasons, engine_seconds=1.0)
        writer.finish(info)


def test_all_runs_are_reported_and_saved(audit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diff", "report", str(audit)]) == 0
    text = capsys.readouterr().out
    assert "BITWISE  same against record: all 96 rows are bit-equal." in text
    assert "FAULT" not in text
    assert "part is a subset of 2 sequences" in text
    assert "\x1b" not in text
    assert "[bold]" in text
    stems = {path.name.removesuffix("-vs-record.parquet") for path in audit.glob("diffs/*.parquet")}
    assert stems == {"imported", "same", "noisy", "part"}
    part = pq.read_table(audit / "diffs" / "part-vs-record.parquet")
    assert set(part["sequence_id"].to_pylist()) == {"s1", "s2"}


def test_json_of_an_imported_run_says_what_it_lacks(
    audit: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--candidate", "imported", "--format", "json", "--no-save"]
    assert run(["diff", "report", str(audit), *arguments]) == 0
    pair = json.loads(capsys.readouterr().out)["pairs"][0]
    metrics = {metric["name"]: metric for metric in pair["metrics"]}
    assert metrics["delta.mean"]["value"] == pytest.approx(-0.01, abs=1e-6)
    assert metrics["kl.mean"]["value"] is None
    assert metrics["kl.mean"]["note"]
    assert pair["flips"]["reason"]
    assert not (audit / "diffs").exists()


def test_a_pair_of_candidates_needs_neither_to_be_the_record(
    audit: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--baseline", "same", "--candidate", "noisy", "--format", "json", "--no-save"]
    assert run(["diff", "report", str(audit), *arguments]) == 0
    metrics = json.loads(capsys.readouterr().out)["pairs"][0]["metrics"]
    assert next(m for m in metrics if m["name"] == "kl.mean")["value"] > 0


def test_show_reads_the_same_audit(audit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diff", "show", str(audit), "--candidate", "noisy", "--worst", "2"]) == 0
    assert capsys.readouterr().out.count("best token:") == 2


def test_disjoint_runs_exit_4(audit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened = AuditDir.open(audit)
    first = opened.read_tokens("noisy").slice(0, LENGTH)
    _write_run(opened, "first", first, {**run_info("first"), "subset": ["s0"]})
    arguments = ["--baseline", "first", "--candidate", "part"]
    assert run(["diff", "report", str(audit), *arguments]) == 4
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no scored token in common" in captured.err


def test_an_unknown_run_exits_2(audit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diff", "report", str(audit), "--candidate", "nosy"]) == 2
    assert "'noisy'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--candidate", "same", "--profile", "bitwise"], 0),
        (["--candidate", "noisy", "--profile", "bitwise"], 1),
        (["--candidate", "noisy", "--fail-on", "kl.mean > 1"], 0),
        (["--candidate", "noisy", "--fail-on", "flip.hard > 1e-6"], 3),
        (["--candidate", "imported", "--fail-on", "kl.mean > 1"], 4),
        (["--candidate", "noisy", "--profile", "rl"], 2),
    ],
)
def test_verdicts_on_stored_runs(audit: Path, arguments: list[str], code: int) -> None:
    assert run(["diff", "report", str(audit), *arguments]) == code


def test_stored_repeats_are_a_floor(audit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened = AuditDir.open(audit)
    repeat = {**run_info("noisy"), "repeat_of": "noisy", "repeat_kind": "rerun"}
    _write_run(opened, "noisy-repeat2", opened.read_tokens("noisy"), repeat)
    arguments = ["--candidate", "noisy", "--fail-on", "kl.mean > 1", "--require-floor"]
    assert run(["diff", "report", str(audit), *arguments]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Floor: rerun of noisy, 2 runs, 1 pair: the floor is exactly 0" in text
    document = json.loads((audit / "diffs" / "noisy-vs-record.json").read_text())
    assert document["pairs"][0]["verdict"]["outcome"] == "pass"
    floors = {m["name"]: m["floor"] for m in document["pairs"][0]["metrics"]}
    assert (floors["kl.mean"]["value"], floors["kl.mean"]["ratio"]) == (0.0, None)


def test_a_read_only_audit_is_told_about_no_save(
    audit: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (audit / "diffs").write_text("in the way")
    assert run(["diff", "report", str(audit)]) == 2
    assert "--no-save" in capsys.readouterr().err
    assert run(["diff", "report", str(audit), "--no-save"]) == 0
