"""docs/formats.md names every column and key that is written."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from tests.storage.build import make_audit, make_run
from trace_audit.storage.audit_dir import AuditInfo
from trace_audit.storage.prompt_fields import check_keys
from trace_audit.storage.schema import (
    EXACT_KL_SCHEMA,
    FORMAT_VERSION,
    FULL_LOGPROBS_SCHEMA,
    OPTIONAL_FIELDS,
    SHARD_SCHEMA,
    TRACE_SCHEMA,
    VOCABULARY_SCHEMA,
)

DOCUMENT = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"`([^`\n]+)`", DOCUMENT))


SCHEMAS = [SHARD_SCHEMA, TRACE_SCHEMA, VOCABULARY_SCHEMA, FULL_LOGPROBS_SCHEMA, EXACT_KL_SCHEMA]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_column_is_documented(schema) -> None:  # type: ignore[no-untyped-def]
    assert set(schema.names) <= NAMED


def test_every_optional_column_is_documented() -> None:
    assert {field.name for field in OPTIONAL_FIELDS} <= NAMED


def test_every_key_of_audit_json_is_documented() -> None:
    assert {field.name for field in fields(AuditInfo)} <= NAMED


def test_every_key_of_the_prompts_file_is_documented() -> None:
    table = DOCUMENT.split("## The prompts file")[1].split("## ")[0]
    keys = re.findall(r"^\| `(\w+)`", table, flags=re.MULTILINE)
    check_keys(dict.fromkeys(keys))
    assert len(keys) == 9


def test_the_version_is_the_current_one() -> None:
    assert f"Format version: {FORMAT_VERSION}," in DOCUMENT


def test_every_file_is_documented(tmp_path: Path) -> None:
    audit = make_audit(tmp_path / "audit")
    make_run(audit, "x")
    names = {path.name for path in audit.path.rglob("*") if path.is_file()}
    assert "tokens.parquet" in names
    assert [name for name in sorted(names) if name not in DOCUMENT] == []
