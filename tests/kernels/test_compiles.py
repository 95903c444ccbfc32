"""Every kernel compiles for a GPU; the interpreter takes more than a compiler does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trace_audit.kernels.runtime import triton

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(triton is None, reason="no Triton on this platform")
@pytest.mark.timeout(900)
def test_every_kernel_compiles_for_a_gpu(tmp_path):
    sources = (ROOT / "trace_audit" / "kernels").glob("*.py")
    kernels = {n for p in sources for n in re.findall(r"def (_\w+_kernel)\(", p.read_text())}
    assert len(kernels) >= 16
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_all"],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert set(done.stdout.split()) == kernels
