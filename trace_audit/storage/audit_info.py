"""audit.json: what an audit directory says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from trace_audit.errors import AuditDirError
from trace_audit.storage.files import read_json, unsealed
from trace_audit.storage.schema import FORMAT_NAME, FORMAT_VERSION

AUDIT_NAME = "audit.json"
RECORD_PARTIAL = ".record.partial"


@dataclass(frozen=True, kw_only=True)
class AuditInfo:
    """audit.json.

    Attributes:
        format_version: Of the whole directory.
        model: As the user gave it.
        model_path: The directory it was loaded from.
        model_revision: Hub revision, where it came from there.
        model_fingerprint: sha256 over configuration and weights.
        tokenizer_fingerprint: sha256 over the tokenizer's files; None without a tokenizer.
        prompts_sha256: sha256 of the prompts file.
        vocabulary_size: Width of the model's logits.
        tokenizer_size: Number of the tokenizer's ids; None without a tokenizer.
        trace_sha256: Digest of the trace's content (``trace_digest``).
        num_sequences: Sequences of the trace.
        num_output_tokens: Output tokens of the trace.
        seed: Of sampling and of the support's tail draws.
        sampling: temperature, max_tokens, ignore_eos, stop_token_ids, stop_strings.
        files: sha256 and size of trace and vocabulary.
    """

    format_version: int
    model: str
    model_path: str
    model_revision: str | None
    model_fingerprint: str
    tokenizer_fingerprint: str | None
    prompts_sha256: str
    vocabulary_size: int
    tokenizer_size: int | None
    trace_sha256: str
    num_sequences: int
    num_output_tokens: int
    seed: int
    sampling: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """The content of audit.json."""
        return {"format": FORMAT_NAME, **asdict(self)}


def read_audit_info(path: Path) -> AuditInfo:
    """Reads audit.json of a directory.

    Raises:
        AuditDirError: It is missing, no audit, an interrupted record, of a newer format, or
            damaged.
    """
    manifest = path / AUDIT_NAME
    if not manifest.is_file():
        raise _not_an_audit(path)
    value = read_json(manifest)
    if value.get("format") != FORMAT_NAME:
        raise AuditDirError(
            f"{manifest} was not written by trace-audit.", hint="Give an audit directory."
        )
    check_version(manifest, value.get("format_version"))
    value = unsealed(manifest, value)
    names = {field.name for field in fields(AuditInfo)}
    if names != value.keys() - {"format"}:
        wrong = ", ".join(sorted(names ^ (value.keys() - {"format"})))
        raise AuditDirError(f"{manifest} is damaged: keys missing or unknown: {wrong}.")
    if not isinstance(value["files"], dict) or not isinstance(value["sampling"], dict):
        raise AuditDirError(f"{manifest} is damaged: files and sampling must be objects.")
    return AuditInfo(**{name: value[name] for name in names})


def _not_an_audit(path: Path) -> AuditDirError:
    if (path / RECORD_PARTIAL).is_dir():
        return AuditDirError(
            f"The record in {path} was interrupted, so there is no audit yet.",
            hint="Run the same record command again to finish it.",
        )
    if not path.exists():
        return AuditDirError(
            f"There is no audit directory {path}.",
            hint=f"Make one: trace-audit record MODEL --prompts FILE -o {path}",
        )
    return AuditDirError(
        f"{path} is not an audit directory: it has no {AUDIT_NAME}.",
        hint="Give the directory that `trace-audit record -o` made.",
    )


def check_version(path: Path, version: object) -> None:
    """Refuses a file of a newer format, or of none.

    Raises:
        AuditDirError: It is.
    """
    if isinstance(version, str) and version.isdecimal():
        version = int(version)
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise AuditDirError(f"{path} does not state its format version, so it is damaged.")
    if version > FORMAT_VERSION:
        raise AuditDirError(
            f"{path} has format version {version}; this trace-audit reads up to {FORMAT_VERSION}.",
            hint="Read it with the newer trace-audit that wrote it.",
        )
