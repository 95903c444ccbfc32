"""A disk that refuses ends a run with one sentence, and what was finished stays."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.storage.build import (
    RUN_INFO,
    SHARDS,
    finish_record,
    make_audit,
    make_run,
    missing,
    open_record,
    tree,
    write_shards,
)
from trace_audit.errors import RunFailedError
from trace_audit.storage.audit_dir import AuditDir
from trace_audit.storage.files import write_atomically, write_json
from trace_audit.storage.schema import SHARD_SCHEMA
from trace_audit.storage.tables import write_table


@pytest.fixture
def small_files() -> Iterator[None]:
    """The system refuses files over 4096 bytes, as a full disk would."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, old[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, old)
    signal.signal(signal.SIGXFSZ, handler)


def no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_refused_shard_leaves_no_file(tmp_path: Path, small_files: None) -> None:
    with open_record(tmp_path / "a") as writer:
        with pytest.raises(RunFailedError, match=r"shard-000000.parquet could not .*: file too"):
            write_shards(writer, [0])
        assert writer.finished_shards == frozenset()
        names = {p.name for p in (tmp_path / "a" / ".record.partial").iterdir()}
        assert names == {"lock", "job.json"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_pyarrow_reports_a_full_disk(tmp_path: Path) -> None:
    full = Path("/dev/full")
    table = SHARD_SCHEMA.empty_table()
    with pytest.raises(RunFailedError, match="no space left on device") as caught:
        write_atomically(tmp_path / "x", lambda _: write_table(full, SHARD_SCHEMA, [table], {}))
    assert caught.value.hint is not None
    assert "Free some space" in caught.value.hint
    assert "\n" not in caught.value.message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_in_the_middle_and_then_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    whole = make_audit(tmp_path / "whole")
    with open_record(tmp_path / "a") as writer:
        write_shards(writer, [0])
        with monkeypatch.context() as patch:
            patch.setattr(os if call == "fsync" else Path, call, no_space)
            with pytest.raises(RunFailedError, match="no space left on device"):
                write_shards(writer, [1])
    with open_record(tmp_path / "a") as writer:
        assert writer.finished_shards == {0}
        write_shards(writer, missing(writer))
        finish_record(writer)
    assert tree(tmp_path / "a") == tree(whole.path)


def test_a_full_disk_while_merging_keeps_the_shards_and_the_old_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = make_audit(tmp_path / "a")
    make_run(audit, "x")
    old = tree(audit.path)
    with audit.run_writer("x", job_digest="n", num_shards=len(SHARDS), force=True) as writer:
        write_shards(writer, range(len(SHARDS)), seed=4)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", no_space)
            with pytest.raises(RunFailedError, match="no space left"):
                writer.finish(RUN_INFO)
    assert {k: v for k, v in tree(audit.path).items() if ".partial" not in k} == old
    with audit.run_writer("x", job_digest="n", num_shards=len(SHARDS), force=True) as writer:
        assert not missing(writer)
        writer.finish(RUN_INFO)
    assert audit.verify() == []


@pytest.mark.parametrize("refused", range(1, 8))
def test_a_move_that_the_system_refuses_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    audit = make_audit(tmp_path / "a")
    rename, calls = Path.rename, [0]

    def sometimes(self: Path, target: Path) -> Path:
        calls[0] += 1
        if calls[0] == refused:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    with open_record(audit.path, "b", force=True) as writer:
        write_shards(writer, range(len(SHARDS)), seed=4)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", sometimes)
            with pytest.raises(RunFailedError, match="input/output error"):
                finish_record(writer, model="new")
        assert AuditDir.open(audit.path).info == audit.info
        assert AuditDir.open(audit.path).verify() == []
        finish_record(writer, model="new")
    assert AuditDir.open(audit.path).info.model == "new"


def test_a_place_where_nothing_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunFailedError, match="not a directory"):
        open_record(tmp_path / "file" / "audit")


def test_json_is_strict(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "x.json", {"a": float("nan")})
    assert list(tmp_path.iterdir()) == []
