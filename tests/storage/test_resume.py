"""An interrupted run ends with the bytes of one that was not; half-written files never count."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.storage.build import (
    LENGTHS,
    RUN_INFO,
    SHARDS,
    finish_record,
    make_audit,
    make_run,
    missing,
    open_record,
    shard_table,
    tree,
    write_shards,
)
from trace_audit.errors import AuditDirError
from trace_audit.storage.audit_dir import AuditDir
from trace_audit.storage.run_writer import RunWriter


@pytest.fixture
def audit(tmp_path: Path) -> AuditDir:
    return make_audit(tmp_path / "audit")


def run_writer(audit: AuditDir, digest: str = "seed 1", force: bool = False) -> RunWriter:
    return audit.run_writer("x", job_digest=digest, num_shards=len(SHARDS), force=force)


def partial(audit: AuditDir) -> Path:
    return audit.path / "runs" / ".x.partial"


def test_equal_runs_are_equal_files(tmp_path: Path) -> None:
    first, second = make_audit(tmp_path / "a"), make_audit(tmp_path / "b")
    make_run(first, "x")
    make_run(second, "x")
    assert tree(first.path) == tree(second.path)


def test_a_resumed_run_has_the_bytes_of_an_uninterrupted_one(audit: AuditDir) -> None:
    whole = make_run(audit, "whole") / "tokens.parquet"
    with run_writer(audit) as writer:
        write_shards(writer, [2, 0])
    assert "x" not in audit.run_names()
    with run_writer(audit) as writer:
        assert writer.finished_shards == {0, 2}
        assert writer.finished_tokens == sum(LENGTHS[i] for s in (0, 2) for i in SHARDS[s])
        write_shards(writer, missing(writer), seed=0)
        path = writer.finish(RUN_INFO)
    assert (path / "tokens.parquet").read_bytes() != whole.read_bytes()  # another seed
    make_run(audit, "x", force=True)
    with audit.run_writer("y", job_digest="y", num_shards=len(SHARDS), force=False) as writer:
        write_shards(writer, [3, 1], seed=1)
    with audit.run_writer("y", job_digest="y", num_shards=len(SHARDS), force=False) as writer:
        write_shards(writer, missing(writer), seed=1)
        assert writer.engine_seconds == 0.25 * len(SHARDS)
        writer.finish(RUN_INFO)
    resumed = audit.path / "runs" / "y"
    assert (resumed / "tokens.parquet").read_bytes() == whole.read_bytes()
    assert audit.run_info("y")["counters"] == audit.run_info("whole")["counters"]
    assert audit.run_info("y")["counters"] == {"tokens": 40, "steps": 12}


def test_a_resumed_record_has_the_bytes_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = make_audit(tmp_path / "whole")
    with open_record(tmp_path / "a") as writer:
        write_shards(writer, [1])
    with pytest.raises(AuditDirError, match="interrupted"):
        AuditDir.open(tmp_path / "a")
    resumed = make_audit(tmp_path / "a")
    assert tree(resumed.path) == tree(whole.path)


def test_a_writer_that_fails_to_finish_can_be_finished_later(tmp_path: Path) -> None:
    with open_record(tmp_path / "a") as writer:
        write_shards(writer, range(len(SHARDS)))
    with open_record(tmp_path / "a") as writer:
        assert not missing(writer)
        finish_record(writer)
    assert AuditDir.open(tmp_path / "a").verify() == []


def damage_truncate(path: Path) -> None:
    os.truncate(path.with_suffix(".parquet"), path.with_suffix(".parquet").stat().st_size - 1)


def damage_flip(path: Path) -> None:
    data = bytearray(path.with_suffix(".parquet").read_bytes())
    data[len(data) // 2] ^= 1
    path.with_suffix(".parquet").write_bytes(data)


def damage_no_table(path: Path) -> None:
    path.with_suffix(".parquet").unlink()


def damage_no_sidecar(path: Path) -> None:
    path.unlink()


def damage_half_sidecar(path: Path) -> None:
    path.write_text(path.read_text()[:20])


def damage_other_shard(path: Path) -> None:
    path.with_suffix(".parquet").write_bytes(path.with_name("shard-000000.parquet").read_bytes())


DAMAGES = [
    damage_truncate,
    damage_flip,
    damage_no_table,
    damage_no_sidecar,
    damage_half_sidecar,
    damage_other_shard,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_done_again(audit: AuditDir, damage) -> None:  # type: ignore[no-untyped-def]
    whole = make_run(audit, "whole") / "tokens.parquet"
    with run_writer(audit) as writer:
        write_shards(writer, [0, 1], seed=1)
    damage(partial(audit) / "shard-000001.json")
    with run_writer(audit) as writer:
        assert writer.finished_shards == {0}
        write_shards(writer, missing(writer), seed=1)
        path = writer.finish(RUN_INFO)
    assert (path / "tokens.parquet").read_bytes() == whole.read_bytes()


def test_a_file_under_its_temporary_name_is_removed(audit: AuditDir) -> None:
    with run_writer(audit) as writer:
        write_shards(writer, [0])
    temporary = partial(audit) / ".writing-shard-000001.parquet"
    temporary.write_bytes((partial(audit) / "shard-000000.parquet").read_bytes())
    with run_writer(audit) as writer:
        assert writer.finished_shards == {0}
        assert not temporary.exists()


def test_a_shard_damaged_after_it_was_checked_does_not_reach_the_run(audit: AuditDir) -> None:
    with run_writer(audit) as writer:
        write_shards(writer, range(len(SHARDS)))
        damage_flip(partial(audit) / "shard-000002.json")
        with pytest.raises(AuditDirError, match="sha256"):
            writer.finish(RUN_INFO)
    assert audit.run_names() == ["record"]


def test_other_settings_do_not_mix_with_finished_shards(audit: AuditDir) -> None:
    with run_writer(audit) as writer:
        write_shards(writer, [0])
    with pytest.raises(AuditDirError, match="interrupted under other settings, and 1"):
        run_writer(audit, digest="other")
    with run_writer(audit) as writer:
        assert writer.finished_shards == {0}
    with run_writer(audit, digest="other", force=True) as writer:
        assert writer.finished_shards == frozenset()


def test_another_number_of_shards_is_another_setting(audit: AuditDir) -> None:
    with run_writer(audit) as writer:
        write_shards(writer, [0])
    with pytest.raises(AuditDirError, match="other settings"):
        audit.run_writer("x", job_digest="seed 1", num_shards=2, force=False)


def test_an_attempt_without_a_finished_shard_leaves_nothing(tmp_path: Path) -> None:
    audit = make_audit(tmp_path / "audit")
    with run_writer(audit):
        pass
    assert not partial(audit).exists()
    with open_record(tmp_path / "new"):
        pass
    assert not (tmp_path / "new").exists()
    (tmp_path / "empty").mkdir()
    with open_record(tmp_path / "empty"):
        pass
    assert list((tmp_path / "empty").iterdir()) == []


def test_finish_needs_every_shard(audit: AuditDir) -> None:
    with run_writer(audit) as writer:
        write_shards(writer, [0, 2])
        with pytest.raises(ValueError, match=r"shards \[1, 3\]"):
            writer.finish(RUN_INFO)
    assert audit.run_names() == ["record"]


def test_a_shard_is_written_once_and_in_order(audit: AuditDir) -> None:
    with run_writer(audit) as writer:
        write_shards(writer, [0])
        with pytest.raises(ValueError, match="shard 0"):
            write_shards(writer, [0])
        with pytest.raises(ValueError, match="shard 9"):
            writer.write_shard(9, shard_table([1]), counters={}, finish_reasons=["stop"])
        backwards = shard_table([3, 2])
        with pytest.raises(ValueError, match="row 2 is not after"):
            writer.write_shard(1, backwards, counters={}, finish_reasons=["stop", "stop"])
        with pytest.raises(ValueError, match="finish reason"):
            writer.write_shard(1, shard_table([2, 3]), counters={}, finish_reasons=["stop"])
        table = shard_table([2]).drop_columns(["rank"])
        with pytest.raises(ValueError, match="columns missing"):
            writer.write_shard(1, table, counters={}, finish_reasons=["stop"])


_KILLED = """
import sys
from pathlib import Path
from tests.storage.build import open_record, shard_table, write_shards
writer = open_record(Path(sys.argv[1]))
write_shards(writer, [0, 1])
print("ready", flush=True)
while True:
    writer._entries.pop(2, None)
    write_shards(writer, [2])
"""


def test_kill_9_in_the_middle_of_writing(tmp_path: Path) -> None:
    whole = make_audit(tmp_path / "whole")
    child = subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(tmp_path / "a")],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    with pytest.raises(AuditDirError, match="being written by another process"):
        open_record(tmp_path / "a")
    time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    with open_record(tmp_path / "a") as writer:
        assert {0, 1} <= writer.finished_shards <= {0, 1, 2}
        write_shards(writer, missing(writer))
        finish_record(writer)
    assert tree(tmp_path / "a") == tree(whole.path)


def test_timing_stays_out_of_the_bytes(audit: AuditDir) -> None:
    for name, seconds in (("slow", 9.0), ("fast", 0.1)):
        with audit.run_writer(name, job_digest="d", num_shards=1, force=False) as writer:
            table = shard_table(range(len(LENGTHS)))
            reasons = ["stop"] * len(LENGTHS)
            writer.write_shard(
                0, table, counters={}, finish_reasons=reasons, engine_seconds=seconds
            )
            writer.finish({"timing": {"engine_seconds": writer.engine_seconds}})
    files = [audit.path / "runs" / name / "tokens.parquet" for name in ("slow", "fast")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert json.loads(files[0].with_name("run.json").read_text())["timing"] == {
        "engine_seconds": 9.0
    }
