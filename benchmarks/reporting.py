"""What the benchmarks share: running the command line, and a comparison as a row of a table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def command(*arguments: object) -> str:
    """Run trace-audit; its messages pass through, its output comes back.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", "trace_audit", *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def compared(audit: Path, baseline: str, candidate: str) -> dict[str, Any]:
    """The report on one candidate, as JSON has it."""
    text = command("diff", "report", audit, "--baseline", baseline, "--candidate", candidate,
                   "--format", "json", "--no-save")  # fmt: skip
    (pair,) = json.loads(text)["pairs"]
    return dict(pair)


def run_info(audit: Path, name: str) -> dict[str, Any]:
    """A run's run.json."""
    return dict(json.loads((audit / "runs" / name / "run.json").read_text()))


def value(pair: dict[str, Any], name: str) -> str:
    """A metric with its interval; bit-equal runs have no metrics."""
    metric = next((m for m in pair["metrics"] if m["name"] == name), None)
    if metric is None or not isinstance(metric["value"], float):
        return "0" if pair["bitwise"] else "n/a"
    text = f"{metric['value']:.3g}"
    interval = metric["interval"]
    if isinstance(interval, dict):
        text += f" ({interval['low']:.3g} to {interval['high']:.3g})"
    return text


def point(pair: dict[str, Any], name: str) -> str:
    """A metric without its interval."""
    return value(pair, name).partition(" ")[0]
