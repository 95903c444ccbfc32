"""The pages say what the program says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.help_pages import PAGE, documented_pages, help_pages
from trace_audit.config import default_record_config, flat, load_config
from trace_audit.config.model import SECTIONS

ROOT = Path(__file__).parent.parent.parent
CONFIGURATION = ROOT / "docs" / "configuration.md"


def test_every_command_is_documented() -> None:
    assert list(documented_pages(PAGE.read_text(encoding="utf-8"))) == list(help_pages())


@pytest.mark.parametrize("command", list(help_pages()))
def test_the_documented_help_is_the_programs(command: str) -> None:
    """When this fails: `python -m tests.cli.help_pages`."""
    assert documented_pages(PAGE.read_text(encoding="utf-8"))[command] == help_pages()[command]


@pytest.mark.parametrize("table", list(SECTIONS))
def test_every_configuration_key_is_documented_with_its_default(table: str) -> None:
    section = CONFIGURATION.read_text(encoding="utf-8").split(f"\n## `[{table}]`\n")[1]
    row = re.compile(r"^\| `(\w+)` \| `([^`]*)` \|", re.MULTILINE)
    documented = dict(row.findall(section.split("\n## ")[0]))
    defaults = SECTIONS[table]().model_dump()
    assert documented == {key: _toml(value) for key, value in defaults.items()}


def test_every_parallel_key_has_a_section() -> None:
    text = CONFIGURATION.read_text(encoding="utf-8").split("\n## `[parallel]`\n")[1]
    headings = re.findall(r"^### `(\w+)`$", text, re.MULTILINE)
    assert headings == list(SECTIONS["parallel"].model_fields)


def test_every_named_configuration_is_documented() -> None:
    text = CONFIGURATION.read_text(encoding="utf-8")
    names = [path.name for path in sorted((ROOT / "configs").glob("*.toml"))]
    assert [name for name in names if f"`configs/{name}`" not in text] == []


def test_the_readmes_configuration_loads(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    path = tmp_path / "readme.toml"
    path.write_text(block, encoding="utf-8")
    assert flat(load_config(path)) != flat(default_record_config())


def test_example_prompts_are_prompts() -> None:
    from trace_audit.storage.prompts import read_prompts

    entries = read_prompts(ROOT / "examples" / "prompts.jsonl")
    assert len(entries) == 16
    assert any(entry.messages for entry in entries)
    assert any(entry.prompt for entry in entries)


def test_the_example_rollout_is_a_rollout() -> None:
    from trace_audit.storage.prompts import import_warnings, read_prompts

    entries = read_prompts(ROOT / "examples" / "rollout.jsonl")
    assert all(entry.output_token_ids and entry.logprobs for entry in entries)
    assert len({entry.group_id for entry in entries}) == 8
    assert len(entries) == 16
    assert import_warnings(entries) == []


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
