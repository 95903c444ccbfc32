"""`ls` and `verify`: what an audit holds, and whether it is what was written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.small_audit import add_run, interrupt_run, make_audit
from trace_audit.cli.main import run
from trace_audit.storage.audit_dir import AuditDir


@pytest.fixture
def audit(tmp_path: Path) -> AuditDir:
    return make_audit(tmp_path / "audit")


def test_ls_shows_a_line_a_run(audit: AuditDir, capsys: pytest.CaptureFixture[str]) -> None:
    add_run(audit, "bf16-sdpa")
    add_run(audit, "bf16-sdpa-repeat2", repeat_of="bf16-sdpa")
    interrupt_run(audit, "fp16")
    assert run(["ls", str(audit.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["model", "tiny"]
    assert "2 sequences, 5 output tokens" in lines[1]
    assert [line.split()[0] for line in lines[3:]] == [
        "record",
        "bf16-sdpa",
        "bf16-sdpa-repeat2",
        "fp16",
    ]
    assert lines[4].split() == ["bf16-sdpa", "bfloat16", "sdpa", "cpu", "2", "5", "10.0", "-"]
    assert lines[5].endswith("repeats bf16-sdpa")
    assert lines[6].split() == ["fp16", *["-"] * 6, "interrupted"]


def test_ls_tells_a_run_that_is_being_written(
    audit: AuditDir, capsys: pytest.CaptureFixture[str]
) -> None:
    with audit.run_writer("busy", job_digest="job", num_shards=1, force=False):
        assert run(["ls", str(audit.path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("running")


def test_ls_writes_json(audit: AuditDir, capsys: pytest.CaptureFixture[str]) -> None:
    interrupt_run(audit, "fp16")
    assert run(["ls", str(audit.path), "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["audit"]["model"] == "tiny"
    assert list(document["runs"]) == ["record"]
    assert document["interrupted"] == ["fp16"]
    assert document["running"] == []


def test_verify_accepts_what_was_written(
    audit: AuditDir, capsys: pytest.CaptureFixture[str]
) -> None:
    add_run(audit, "bf16-sdpa")
    assert run(["verify", str(audit.path)]) == 0
    assert capsys.readouterr().out == "ok\t2 sequences, runs record, bf16-sdpa\n"


@pytest.mark.parametrize(
    "name", ["trace.parquet", "vocabulary.parquet", "runs/bf16-sdpa/tokens.parquet"]
)
def test_verify_names_every_damaged_file(
    audit: AuditDir, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    add_run(audit, "bf16-sdpa")
    path = audit.path / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert run(["verify", str(audit.path)]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("FAIL\t")
    assert name in line


def test_a_run_without_its_run_json_is_told_everywhere(
    audit: AuditDir, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("bf16-sdpa", "fp16"):
        add_run(audit, name)
    (audit.path / "runs" / "fp16" / "run.json").unlink()
    assert run(["ls", str(audit.path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split(maxsplit=7)[-1] == "damaged: no run.json"
    assert run(["verify", str(audit.path)]) == 1
    assert "fp16 has no run.json" in capsys.readouterr().out
    assert run(["diff", "report", str(audit.path), "--no-save"]) == 0
    told = capsys.readouterr()
    assert "run fp16 has no run.json and is left out" in told.err
    assert "bf16-sdpa" in told.out


def test_verify_misses_the_record(audit: AuditDir, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(audit.path / "runs" / "record")
    assert run(["verify", str(audit.path)]) == 1
    assert "has no run 'record'" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_what_is_no_audit_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert run([command, str(tmp_path / "missing")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "error: " in captured.err
    assert "hint: " in captured.err
