"""The one place that catches errors: exit codes, streams, and how mistakes are told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from trace_audit.cli import main
from trace_audit.cli.lazy import LazyCommand

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def _faulty_command(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = LazyCommand(module="tests.cli.faulty", attribute="faulty", short_help="")
    monkeypatch.setattr(main.cli, "lazy_commands", {**main.COMMANDS, "faulty": lazy})
    monkeypatch.delenv("TRACE_AUDIT_DEBUG", raising=False)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("config", 2),
        ("audit", 2),
        ("invalid", 4),
        ("failed", 70),
        ("bug", 70),
        ("full", 70),
        ("interrupt", 130),
        ("sigterm", 143),
        ("exit", 3),
        ("0", 0),
        ("1", 1),
        ("3", 3),
    ],
)
def test_every_end_has_its_exit_code(
    kind: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["faulty", kind]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert len(captured.err.splitlines()) <= 2


def test_an_error_is_a_sentence_and_a_hint_without_escapes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main.run(["faulty", "config"])
    assert capsys.readouterr().err.splitlines() == [
        r"error: the key \x1b[31mred\x1b[0m is wrong.",
        "hint: use another.",
    ]


def test_a_bug_is_one_sentence_that_says_how_to_see_more(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main.run(["faulty", "bug"])
    error, hint = capsys.readouterr().err.splitlines()
    assert "ZeroDivisionError: division" in error
    assert "TRACE_AUDIT_DEBUG=1" in hint


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--debug", "faulty", "bug"]) == 70
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_debug_shows_the_notes_of_a_runs_own_process(capsys: pytest.CaptureFixture[str]) -> None:
    main.run(["--debug", "faulty", "failed"])
    assert "a note for --debug" in capsys.readouterr().err


@pytest.mark.parametrize(("value", "shown"), [("1", True), ("0", False), ("", False)])
def test_the_environment_can_ask_for_tracebacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: str, shown: bool
) -> None:
    monkeypatch.setenv("TRACE_AUDIT_DEBUG", value)
    main.run(["faulty", "bug"])
    assert ("Traceback" in capsys.readouterr().err) is shown


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["recrod"], "recrod"),
        (["--nothing"], "--nothing"),
        (["replay"], "DIRECTORY"),
        (["replay", "x"], "--config"),
        (["record", "demo", "--prompts", "p"], "--output"),
        (["record", "demo", "--prompts", "p", "-o", "x", "--max-tokens", "0"], "--max-tokens"),
        (["record", "demo", "--prompts", "p", "-o", "x", "--temperature", "nan"], "--temperature"),
        (["record", "demo", "--prompts", "p", "-o", "x", "--temperature", "inf"], "--temperature"),
        (["record", "demo", "--prompts", "p", "-o", "x", "--stop", ""], "--stop"),
        (["record", "demo", "--prompts", "p", "-o", "x", "--stop-token-id", "-1"], "-1"),
        (["record", "demo", "--prompts", "p", "-o", "x", "--set", "dtype=float16,bfloat16"], "one"),
        (["record", "demo", "--prompts", "p", "-o", "x", "--set", "name=y"], "record"),
        (["record", "demo", "--prompts", "missing.jsonl", "-o", "x"], "missing.jsonl"),
        (["record", "demo", "--prompts", "p", "-o", "x", "--config", "no.toml"], "no.toml"),
    ],
)
def test_mistakes_on_the_command_line_exit_2_and_name_the_thing(
    args: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    error, *hints = captured.err.splitlines()
    assert error.startswith("error: ")
    assert said in error
    assert all(hint.startswith("hint: ") for hint in hints)
    assert len(hints) <= 1


def test_nothing_asked_for_shows_help_on_standard_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main.run([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Usage: trace-audit" in captured.err


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_lists_every_command_with_its_own_words(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run([option]) == 0
    shown = capsys.readouterr().out
    for name, lazy in main.COMMANDS.items():
        assert f"  {name}" in shown
        command = main.cli.get_command(click.Context(main.cli), name)
        assert command is not None
        assert command.name == name
        assert lazy.short_help == (command.help or "").partition("\n\n")[0]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("trace-audit, version ")


def test_a_reader_that_went_away_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "trace_audit", "--help"]
    try:
        done = subprocess.run(
            command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, cwd=ROOT
        )
    finally:
        os.close(writer)
    assert done.stderr == ""
    assert done.returncode == main.EXIT_CLOSED_PIPE


def test_help_works_where_torch_is_not_installed() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'triton', 'safetensors'): sys.modules[name] = None\n"
        "from trace_audit.cli.main import COMMANDS, run\n"
        "for name in COMMANDS: assert run([name, '--help']) == 0, name\n"
        "assert run(['env']) == 0\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
