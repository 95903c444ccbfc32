"""What a run tells while it goes on."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from trace_audit.cli.progress import PLAIN_INTERVAL_SECONDS, Rate, plain_lines
from trace_audit.jobs import Message, Progress, Stage

ROOT = Path(__file__).parent.parent.parent


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_rate_and_time_left_leave_out_resumed_tokens() -> None:
    clock = Clock()
    rate = Rate(clock)
    assert rate.describe(Progress(1000, 2000)) == "1000/2000 tokens"
    clock.now += 10
    assert rate.describe(Progress(1100, 2000)) == "1100/2000 tokens, 10.0 tokens/s, 0:01:30 left"


def test_lines_are_sparse_and_the_last_one_comes(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    on_event = plain_lines("run", clock)
    on_event(Stage("loading the model"))
    for done in range(0, 100, 10):
        clock.now += PLAIN_INTERVAL_SECONDS / 5
        on_event(Progress(done, 100))
    on_event(Progress(100, 100))
    on_event(Progress(100, 100))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [line.split(",")[0] for line in captured.err.splitlines()] == [
        "run: loading the model",
        "run: 40/100 tokens",
        "run: 90/100 tokens",
        "run: 100/100 tokens",
    ]


def test_messages_are_shown_at_once_and_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    plain_lines("run")(Message("a \x1b[2Jprompt"))
    assert capsys.readouterr().err == "run: warning: a \\x1b[2Jprompt\n"


_SCRIPT = """
from trace_audit.cli.progress import progress_of
from trace_audit.jobs import Message, Progress, Stage
with progress_of("run[bold]") as on_event:
    on_event(Stage("loading [red]"))
    on_event(Message("look [green]here \\x1b[2J"))
    on_event(Progress(1, 2))
"""


def on_a_terminal(**environment: str) -> str:
    """What the script writes to a terminal."""
    controller, terminal = pty.openpty()
    variables = {**os.environ, "TERM": "xterm", "COLUMNS": "100", **environment}
    variables.pop("NO_COLOR", None) if "NO_COLOR" not in environment else None
    subprocess.run(
        [sys.executable, "-c", _SCRIPT], stderr=terminal, check=True, cwd=ROOT, env=variables
    )
    os.close(terminal)
    shown = b""
    while True:
        try:
            chunk = os.read(controller, 65536)
        except OSError:  # Linux says EIO when the other side is closed.
            break
        if not chunk:
            break
        shown += chunk
    os.close(controller)
    return shown.decode()


def test_a_terminal_gets_a_live_line_without_markup_being_read() -> None:
    shown = on_a_terminal()
    assert "run[bold]" in shown
    assert "look [green]here \\x1b[2J" in shown
    assert "1/2 tokens" in shown
    assert "\x1b[2J" not in shown


def test_no_color_is_honoured() -> None:
    color = "\x1b[3"
    assert color in on_a_terminal()
    assert color not in on_a_terminal(NO_COLOR="1")


def test_a_dumb_terminal_gets_lines() -> None:
    shown = on_a_terminal(TERM="dumb")
    assert "\x1b" not in shown
    assert "run[bold]: loading [red]" in shown
