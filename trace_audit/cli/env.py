"""`trace-audit env`: what a run's numbers would come from."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping

import click


@click.command()
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="How it is written.",
)
def env(output_format: str) -> None:
    """Show what the machine and the libraries are."""
    from trace_audit.cli.messages import printable
    from trace_audit.environment import environment_info

    info: dict[str, object] = {**environment_info(), "gpus": gpus()}
    if output_format == "json":
        click.echo(json.dumps(info, indent=2, allow_nan=False))
        return
    for key, value in _lines(info, ""):
        click.echo(printable(f"{key}: {value}"))


def gpus() -> list[str]:
    """Name, driver and memory of every NVIDIA device, told without torch.

    Returns:
        Empty without a driver; what went wrong where there is one and it does not answer.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
    except (subprocess.SubprocessError, OSError) as error:
        return [f"unknown: {error}"]
    return done.stdout.splitlines()


def _lines(info: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in info.items():
        if isinstance(value, Mapping):
            yield from _lines(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            yield prefix + key, ", ".join(map(str, value)) or "none"
        else:
            yield prefix + key, "none" if value is None else value
