"""`--redact text` leaves no text of tokens and prompts in any format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.diff.synthetic import FakeAudit
from tests.diff.test_cli import Invoke, invoke
from tests.diff.test_compare import audit

__all__ = ["invoke"]
MARKER = "zqxj"


def marked_audit() -> FakeAudit:
    """Every token of the vocabulary, and with it the prompt, has a unique marker."""
    data = audit()
    data.texts = {i: f" {MARKER}{i}\n".encode() for i in range(60)}
    for index, sequence in enumerate(data.sequences):
        # Prompt tokens that no output token is.
        sequence.prompt_token_ids[:] = np.arange(5) + index
    return data


@pytest.mark.parametrize("name", ["terminal", "json", "markdown", "html"])
def test_a_report_holds_no_text(invoke: Invoke, tmp_path: Path, name: str) -> None:
    arguments = ["report", "{dir}", "--format", name]
    assert MARKER in invoke(marked_audit(), *arguments).stdout
    result = invoke(marked_audit(), *arguments, "--redact", "text")
    assert result.exit_code == 0, result.output
    assert MARKER not in result.stdout
    assert "id " in result.stdout
    saved = [path.read_bytes() for path in (tmp_path / "diffs").iterdir()]
    assert len(saved) == 2
    assert not any(MARKER.encode() in content for content in saved)


@pytest.mark.parametrize("name", ["terminal", "markdown", "html"])
def test_a_redacted_report_says_so(invoke: Invoke, name: str) -> None:
    result = invoke(marked_audit(), "report", "{dir}", "--format", name, "--redact", "text")
    assert "Text is redacted" in result.stdout


def test_redacted_json_says_so(invoke: Invoke) -> None:
    result = invoke(marked_audit(), "report", "{dir}", "--format", "json", "--redact", "text")
    assert '"redacted": true' in result.stdout


@pytest.mark.parametrize("which", [["--worst", "5"], ["--sequence", "s2", "--step", "7"]])
def test_tokens_are_shown_without_text(invoke: Invoke, which: list[str]) -> None:
    arguments = ["show", "{dir}", "--candidate", "noisy", *which]
    assert MARKER in invoke(marked_audit(), *arguments).stdout
    result = invoke(marked_audit(), *arguments, "--redact", "text")
    assert result.exit_code == 0, result.output
    assert MARKER not in result.stdout
    assert "<id " in result.stdout
