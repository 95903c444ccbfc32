"""Ctrl-C and SIGTERM in the middle of a run: exit codes, and no process left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.processes import wait_until_dead

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="waits on process descriptors")

# The whole command line, with a run that hangs in place of one that needs a model.
_SCRIPT = """
import sys
from tests import runner_targets
from trace_audit.runner import child
from trace_audit.cli.main import run
if __name__ == "__main__":
    child.execute_audit = runner_targets.hang
    sys.exit(run(sys.argv[1:]))
"""


@contextmanager
def recording(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A `record` in a process group of its own, and the ids of what it started."""
    script, prompts = tmp_path / "script.py", tmp_path / "prompts.jsonl"
    script.write_text(_SCRIPT, encoding="utf-8")
    prompts.write_text('{"prompt": "x"}\n', encoding="utf-8")
    command = [sys.executable, str(script), "record", "demo", "--prompts", str(prompts)]
    command += ["-o", str(tmp_path / "audit")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        stage = process.stderr.readline()
        assert stage.startswith("record: "), stage
        yield process, [int(word) for word in stage.split()[1:]]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
@pytest.mark.parametrize("whole_group", [False, True])
def test_a_signal_ends_the_command_and_its_run(
    tmp_path: Path, number: signal.Signals, code: int, whole_group: bool
) -> None:
    with recording(tmp_path) as (process, pids):
        assert len(pids) == 2
        if whole_group:
            # As a terminal's Ctrl-C does it.
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        output, errors = process.communicate(timeout=20)
        assert wait_until_dead(pids, seconds=0.5)
    assert process.returncode == code
    assert output == ""
    assert "Traceback" not in errors
    assert "the same command goes on from finished shards, if any" in errors
