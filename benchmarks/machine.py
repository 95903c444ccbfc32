"""What a benchmark's figures come from, beyond its command."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import torch

from trace_audit.config import RunConfig
from trace_audit.run_setup import run_environment


def machine(config: RunConfig) -> dict[str, Any]:
    """Processor, GPU, driver, threads and versions, as JSON values.

    Args:
        config: resolved; its device decides whether a GPU is one of these.
    """
    on_gpu = config.engine.device == "cuda"
    return {
        **run_environment(config),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "driver": driver() if on_gpu else None,
        "torch_threads": torch.get_num_threads(),
    }


def driver() -> str:
    """The version of the NVIDIA driver, or why it is not known."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown: nvidia-smi is not installed"
    asked = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return f"unknown: nvidia-smi ended with exit code {done.returncode}"
    return lines[0].strip()
