"""The commands in processes of their own, as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

SMALL = ["--set", "max_num_seqs=4", "--set", "shard_size=4", "--set", "num_threads=1"]


def command(*arguments: object, **environment: str) -> list[str]:
    del environment
    return [sys.executable, "-m", "trace_audit", *map(str, arguments)]


def run(*arguments: object, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        timeout=240,
        check=False,
    )
    assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    if code:
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
    return done


def write_config(path: Path, name: str, /, **engine: object) -> Path:
    values = {"device": "cpu", "max_num_seqs": 4, "shard_size": 4, "num_threads": 1} | engine
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    path.write_text(f'name = "{name}"\n[engine]\n' + "\n".join(lines) + "\n")
    return path


def tokens(audit: Path, name: str) -> Path:
    return audit / "runs" / name / "tokens.parquet"


def run_info(audit: Path, name: str) -> dict:
    return json.loads((audit / "runs" / name / "run.json").read_text())


def finished_shards(audit: Path) -> list[Path]:
    return sorted((audit / "runs").glob(".*/shard-*.json"))


def wait_for_the_lock(audit: Path) -> None:
    """The killed command's child ends by itself, in bounded time."""
    from trace_audit.storage.lock import is_locked

    deadline = time.monotonic() + 30
    while any(is_locked(partial) for partial in (audit / "runs").glob(".*.partial")):
        assert time.monotonic() < deadline, "the run outlived its killed command"
        time.sleep(0.01)
