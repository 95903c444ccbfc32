"""What a model and a tokenizer are, as sha256 over their files."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from trace_audit.errors import ModelError
from trace_audit.storage import files
from trace_audit.storage.files import reason_of

_TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
_TEMPLATES = "additional_chat_templates"


def cache_dir() -> Path:
    """Where the tool keeps what it can make again: TRACE_AUDIT_CACHE, or ~/.cache/trace-audit."""
    given = os.environ.get("TRACE_AUDIT_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "trace-audit"


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file, remembered for as long as the file is untouched.

    Untouched means: same path, size, mtime and ctime. Copying another file over it changes the
    ctime even where size and mtime are kept.

    Raises:
        OSError: The file cannot be read.
    """
    path = path.resolve()
    key = _file_key(path)
    entry = cache_dir() / "hashes" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()}.json"
    known = _remembered(entry, key)
    if known is not None:
        return known
    digest = files.file_sha256(path)
    if _file_key(path) == key:
        _remember(entry, key, digest)
    return digest


def model_fingerprint(directory: Path) -> str:
    """Hex sha256 over config.json and every *.safetensors of a model directory.

    Generation settings and the tokenizer are not part of it: they do not change logits.

    Raises:
        ModelError: One of them is missing or cannot be read.
    """
    config = directory / "config.json"
    weights = sorted(directory.glob("*.safetensors"))
    if not config.is_file() or not weights:
        missing = "weights (*.safetensors)" if config.is_file() else "config.json"
        raise ModelError(
            f"The model directory {directory} has no {missing}.",
            hint="Give a Hugging Face model directory with safetensors weights.",
        )
    return _combined(directory, [config, *weights])


def tokenizer_fingerprint(directory: Path) -> str | None:
    """Hex sha256 over the tokenizer's files and chat templates; None if there are none.

    Raises:
        ModelError: One of them cannot be read.
    """
    paths = [directory / name for name in _TOKENIZER_FILES if (directory / name).is_file()]
    paths += sorted((directory / _TEMPLATES).glob("*.jinja"))
    return _combined(directory, paths) if paths else None


def _combined(directory: Path, paths: Iterable[Path]) -> str:
    try:
        hashes = {path.relative_to(directory).as_posix(): file_sha256(path) for path in paths}
    except OSError as error:
        raise ModelError(f"{error.filename} cannot be read: {reason_of(error)}.") from error
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()


def _file_key(path: Path) -> dict[str, object]:
    stat = path.stat()
    return {
        "path": os.fsencode(path).hex(),
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "ctime_ns": stat.st_ctime_ns,
    }


def _remembered(entry: Path, key: dict[str, object]) -> str | None:
    try:
        value = json.loads(entry.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # The cache only saves time; without it the file is hashed.
        return None
    if not isinstance(value, dict) or value.get("key") != key:
        return None
    digest = value.get("sha256")
    return digest if isinstance(digest, str) and len(digest) == 64 else None


def _remember(entry: Path, key: dict[str, object], digest: str) -> None:
    # The cache only saves time: a disk that takes no more must not stop the run.
    with suppress(OSError):
        entry.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=entry.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({"key": key, "sha256": digest}, file)
        Path(name).replace(entry)
