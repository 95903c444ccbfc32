"""Fingerprints follow the content; the cache never serves a file that changed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from trace_audit.errors import ModelError
from trace_audit.storage import files
from trace_audit.storage.fingerprint import (
    cache_dir,
    file_sha256,
    model_fingerprint,
    tokenizer_fingerprint,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRACE_AUDIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model-1.safetensors").write_bytes(b"one")
    (path / "model-2.safetensors").write_bytes(b"two")
    return path


def test_the_cache_directory(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_dir() == cache
    monkeypatch.delenv("TRACE_AUDIT_CACHE")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_dir() == Path("/home/someone/.cache/trace-audit")


def test_a_file_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"content")
    expected = hashlib.sha256(b"content").hexdigest()
    assert file_sha256(path) == expected
    monkeypatch.setattr(files, "file_sha256", lambda _: pytest.fail("hashed again"))
    assert file_sha256(path) == expected


def test_a_changed_file_is_hashed_again_even_with_its_old_size_and_mtime(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"content")
    old = path.stat()
    file_sha256(path)
    # The clock of a file system may tick every few milliseconds only.
    while path.stat().st_ctime_ns == old.st_ctime_ns:
        path.write_bytes(b"changed")
        os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert path.stat().st_mtime_ns == old.st_mtime_ns
    assert file_sha256(path) == hashlib.sha256(b"changed").hexdigest()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"key": 1}', '{"sha256": "x"}'])
def test_a_damaged_cache_is_ignored(tmp_path: Path, cache: Path, text: str) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"content")
    file_sha256(path)
    (entry,) = (cache / "hashes").iterdir()
    entry.write_text(text)
    assert file_sha256(path) == hashlib.sha256(b"content").hexdigest()


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path: Path, cache: Path) -> None:
    cache.write_text("a file is in the way")
    (tmp_path / "f").write_bytes(b"content")
    assert file_sha256(tmp_path / "f") == hashlib.sha256(b"content").hexdigest()


def test_a_model_is_its_configuration_and_its_weights(model: Path) -> None:
    seen = {model_fingerprint(model)}
    (model / "generation_config.json").write_text("{}")
    (model / "tokenizer.json").write_text("{}")
    assert model_fingerprint(model) in seen
    for name, content in [
        ("config.json", b'{"a": 1}'),
        ("model-1.safetensors", b"other"),
        ("model-3.safetensors", b"three"),
    ]:
        (model / name).write_bytes(content)
        fingerprint = model_fingerprint(model)
        assert fingerprint not in seen
        seen.add(fingerprint)


def test_swapped_weights_are_another_model(model: Path) -> None:
    before = model_fingerprint(model)
    (model / "model-1.safetensors").write_bytes(b"two")
    (model / "model-2.safetensors").write_bytes(b"one")
    assert model_fingerprint(model) != before


def test_a_moved_model_is_the_same_model(model: Path) -> None:
    before = model_fingerprint(model)
    assert model_fingerprint(model.rename(model.with_name("moved"))) == before


def test_what_is_no_model(model: Path) -> None:
    (model / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config.json"):
        model_fingerprint(model)
    (model / "config.json").write_text("{}")
    for path in model.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ModelError, match="has no weights"):
        model_fingerprint(model)


def test_a_broken_link_to_the_weights(model: Path) -> None:
    (model / "model-1.safetensors").unlink()
    (model / "model-1.safetensors").symlink_to("gone")
    with pytest.raises(ModelError, match="gone cannot be read: no such file"):
        model_fingerprint(model)


def test_a_tokenizer_is_its_files_and_templates(model: Path) -> None:
    assert tokenizer_fingerprint(model) is None
    (model / "tokenizer.json").write_text("{}")
    first = tokenizer_fingerprint(model)
    assert first is not None
    (model / "chat_template.jinja").write_text("x")
    second = tokenizer_fingerprint(model)
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool.jinja").write_text("x")
    assert len({first, second, tokenizer_fingerprint(model)}) == 3
