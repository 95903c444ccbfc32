"""Nothing is replaced unasked, nothing that is not an audit is deleted, the old stays till last."""

from __future__ import annotations

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
from trace_audit.errors import AuditDirError, RunFailedError
from trace_audit.storage.audit_dir import AuditDir
from trace_audit.storage.lock import is_locked
from trace_audit.storage.run_writer import RunWriter


class Interrupted(BaseException):
    """Stands for a kill: nothing catches it."""


@pytest.fixture
def audit(tmp_path: Path) -> AuditDir:
    audit = make_audit(tmp_path / "audit")
    make_run(audit, "x")
    return audit


def test_an_audit_is_replaced_with_force_only(audit: AuditDir) -> None:
    before = tree(audit.path)
    with pytest.raises(AuditDirError, match="already holds an audit"):
        open_record(audit.path)
    assert tree(audit.path) == before
    make_audit(audit.path, digest="b", force=True, seed=5)
    assert AuditDir.open(audit.path).run_names() == ["record"]
    assert AuditDir.open(audit.path).verify() == []
    assert not (audit.path / ".record.partial").exists()


def test_the_old_audit_stays_readable_until_the_new_one_is_complete(audit: AuditDir) -> None:
    with open_record(audit.path, "b", force=True) as writer:
        write_shards(writer, range(len(SHARDS)), seed=5)
        old = AuditDir.open(audit.path)
        assert old.verify() == []
        assert old.run_names() == ["record", "x"]
        finish_record(writer, model="new")
    assert AuditDir.open(audit.path).info.model == "new"


def test_an_interrupted_replacement_leaves_the_old_audit(audit: AuditDir) -> None:
    with open_record(audit.path, "b", force=True) as writer:
        write_shards(writer, [0])
    assert AuditDir.open(audit.path).verify() == []
    with pytest.raises(AuditDirError, match="already holds an audit"):
        open_record(audit.path, "b")
    with open_record(audit.path, "b", force=True) as writer:
        assert writer.finished_shards == {0}


def test_a_users_own_files_in_an_audit_stay(audit: AuditDir) -> None:
    (audit.path / "notes.txt").write_text("mine")
    make_audit(audit.path, digest="b", force=True)
    assert (audit.path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    "content",
    [
        {"thesis.tex": "x"},
        {"audit.json": '{"auditReportVersion": 2}'},
        {"audit.json": "{half"},
        {"audit.json": "[]"},
        {"runs/run.json": "{}"},
    ],
)
def test_a_directory_that_is_no_audit_is_never_touched(
    tmp_path: Path, content: dict[str, str], force: bool
) -> None:
    for name, text in content.items():
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / name).write_text(text)
    before = tree(tmp_path / "d")
    with pytest.raises(AuditDirError, match="holds no audit, so nothing in it is touched"):
        open_record(tmp_path / "d", force=force)
    assert tree(tmp_path / "d") == before


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    with pytest.raises(AuditDirError, match="not a directory"):
        open_record(tmp_path / "f", force=True)
    assert (tmp_path / "f").read_text() == "x"


def test_a_record_goes_into_an_empty_directory(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    inode = (tmp_path / "d").stat().st_ino
    make_audit(tmp_path / "d")
    # It may be a mount point: the directory itself is not replaced.
    assert (tmp_path / "d").stat().st_ino == inode


def test_a_run_is_replaced_with_force_only(audit: AuditDir) -> None:
    before = tree(audit.path)
    with pytest.raises(AuditDirError, match="already has a run 'x'"):
        audit.run_writer("x", job_digest="d", num_shards=1, force=False)
    assert tree(audit.path) == before
    old = audit.read_tokens("x")
    with audit.run_writer("x", job_digest="d", num_shards=len(SHARDS), force=True) as writer:
        write_shards(writer, range(len(SHARDS)), seed=9)
        assert audit.read_tokens("x")["logits_hash"].equals(old["logits_hash"])
        writer.finish(RUN_INFO)
    assert audit.verify() == []
    assert not audit.read_tokens("x")["logits_hash"].equals(old["logits_hash"])
    assert sorted(p.name for p in (audit.path / "runs").iterdir()) == ["record", "x"]


def test_force_does_not_replace_what_is_no_run(audit: AuditDir) -> None:
    (audit.path / "runs" / "mine").mkdir()
    with pytest.raises(AuditDirError, match="is not a run"):
        audit.run_writer("mine", job_digest="d", num_shards=1, force=True)


@pytest.mark.parametrize("name", ["record", "imported", "", ".x", "a/b", "..", "a\nb", "n" * 101])
def test_names_that_cannot_be_runs(audit: AuditDir, name: str) -> None:
    with pytest.raises(AuditDirError, match="run"):
        audit.run_writer(name, job_digest="d", num_shards=1, force=True)


def interrupt_renames(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Lets so many moves of finished parts happen, and dies in the next."""
    rename = Path.rename
    left = [after]

    def counted(self: Path, target: Path) -> Path:
        if left[0] == 0:
            raise Interrupted
        left[0] -= 1
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", counted)


@pytest.mark.parametrize("after", range(9))
@pytest.mark.parametrize("then", ["other", "same"])
def test_a_kill_while_the_audit_is_being_replaced(
    audit: AuditDir, monkeypatch: pytest.MonkeyPatch, after: int, then: str
) -> None:
    (audit.path / "diffs").mkdir()
    (audit.path / "diffs" / "d.json").write_text("{}")
    old = tree(audit.path)
    with monkeypatch.context() as patch:
        writer = open_record(audit.path, "b", force=True)
        write_shards(writer, range(len(SHARDS)), seed=5)
        # 5 old parts out (audit.json first), 4 new ones in (audit.json last).
        interrupt_renames(patch, after)
        with pytest.raises(Interrupted):
            finish_record(writer, model="new")
        writer._lock.release()
    if after == 0:
        assert AuditDir.open(audit.path).info == audit.info
    else:
        with pytest.raises(AuditDirError, match="interrupted"):
            AuditDir.open(audit.path)
    if then == "same":
        with open_record(audit.path, "b", force=True) as writer:
            assert not missing(writer)
            assert AuditDir.open(audit.path).verify() == []
            finish_record(writer, model="new")
        assert AuditDir.open(audit.path).info.model == "new"
    else:
        with open_record(audit.path, "c", force=True):
            pass
        assert tree(audit.path) == old
    assert AuditDir.open(audit.path).verify() == []


@pytest.mark.parametrize("after", [0, 1])
def test_a_kill_while_a_run_is_being_replaced(
    audit: AuditDir, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    old = tree(audit.path)

    def writer_of(digest: str) -> RunWriter:
        return audit.run_writer("x", job_digest=digest, num_shards=len(SHARDS), force=True)

    with monkeypatch.context() as patch:
        writer = writer_of("b")
        write_shards(writer, range(len(SHARDS)), seed=5)
        interrupt_renames(patch, after)
        with pytest.raises(Interrupted):
            writer.finish(RUN_INFO)
        writer._lock.release()
    with writer_of("c"):
        pass
    assert tree(audit.path) == old


def test_two_writers_of_one_run(audit: AuditDir) -> None:
    with audit.run_writer("y", job_digest="d", num_shards=1, force=False):
        with pytest.raises(AuditDirError, match="being written by another process"):
            audit.run_writer("y", job_digest="d", num_shards=1, force=False)
        with pytest.raises(AuditDirError, match="being written by another process"):
            audit.run_writer("y", job_digest="e", num_shards=1, force=True)
        with audit.run_writer("z", job_digest="d", num_shards=1, force=False):
            pass
    with audit.run_writer("y", job_digest="d", num_shards=1, force=False):
        pass


def test_a_lock_can_be_asked_for_by_who_may_only_read(audit: AuditDir) -> None:
    partial = audit.path / "runs" / ".y.partial"
    assert not is_locked(partial)
    with audit.run_writer("y", job_digest="d", num_shards=len(SHARDS), force=False) as writer:
        (partial / "lock").chmod(0o444)
        write_shards(writer, [0])
        assert is_locked(partial)
    assert not is_locked(partial)


def test_two_records_of_one_directory(tmp_path: Path) -> None:
    with open_record(tmp_path / "a"), pytest.raises(AuditDirError, match="another process"):
        open_record(tmp_path / "a", force=True)


def test_an_audit_is_not_replaced_under_a_run_that_is_being_written(audit: AuditDir) -> None:
    with audit.run_writer("y", job_digest="d", num_shards=len(SHARDS), force=False) as run:
        write_shards(run, range(len(SHARDS)), seed=3)
        with open_record(audit.path, "b", force=True) as record:
            write_shards(record, range(len(SHARDS)), seed=5)
            with pytest.raises(AuditDirError, match=r"Run 'y' of .* is being written"):
                finish_record(record)
        run.finish(RUN_INFO)
    assert AuditDir.open(audit.path).run_names() == ["record", "x", "y"]


def test_a_run_of_an_audit_that_was_recorded_anew_is_refused(audit: AuditDir) -> None:
    with open_record(audit.path, "b", force=True) as record:
        write_shards(record, range(len(SHARDS)), seed=5)
        finish_record(record, model="new")
    with audit.run_writer("y", job_digest="d", num_shards=len(SHARDS), force=False) as run:
        write_shards(run, range(len(SHARDS)))
        with pytest.raises(RunFailedError, match="recorded anew"):
            run.finish(RUN_INFO)
