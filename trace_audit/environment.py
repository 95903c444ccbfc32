"""What a run's numbers depend on besides its configuration: processor, libraries, settings."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "triton", "transformers", "safetensors", "numpy", "pyarrow")
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
_CPU_INFO = Path("/proc/cpuinfo")
# Variables that change which kernel or precision a library picks.
_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_DEFAULT_FPMATH_MODE",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TRITON_DEFAULT_FP_FUSION",
    "TRITON_INTERPRET",
)
# Told to a reader, but no number depends on them: threads are part of the configuration.
_NOT_NUMERIC = frozenset({"python", "platform", "cpu_count"})
_NOT_NUMERIC_PACKAGES = frozenset({"pyarrow", "safetensors"})


def environment_info() -> dict[str, Any]:
    """This machine and its libraries, as JSON values; asks neither torch nor a GPU.

    Keys: python, platform, machine, cpu_model, cpu_flags (those that choose kernels), cpu_count
    (cores this process may use), libc, versions (null where a package is absent), variables (those
    that are set and change numerics). The caller adds what it knows of a GPU.
    """
    cpu = _cpu_info()
    flags = set(cpu.get("flags", cpu.get("Features", "")).split())
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu_model": cpu.get("model name") or platform.processor() or platform.machine(),
        "cpu_flags": [flag for flag in _CPU_FLAGS if flag in flags],
        "cpu_count": _cpu_count(),
        "libc": " ".join(platform.libc_ver()).strip(),
        "versions": {**{name: _version(name) for name in _PACKAGES}, "trace_audit": _own_version()},
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def environment_fingerprint(info: Mapping[str, object]) -> str:
    """Hex sha256 over what can change numerics.

    Left out are the Python version, the operating system's, the number of cores, and the versions
    of the packages that only read and write files. Everything else counts, keys that the caller
    added too; the order of keys does not.

    Args:
        info: `environment_info()`, with the caller's additions.
    """
    numeric = {key: value for key, value in info.items() if key not in _NOT_NUMERIC}
    versions = numeric.get("versions")
    if isinstance(versions, Mapping):
        numeric["versions"] = {
            name: value for name, value in versions.items() if name not in _NOT_NUMERIC_PACKAGES
        }
    text = json.dumps(numeric, sort_keys=True, ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _cpu_info() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty where there is none, as on macOS."""
    if not _CPU_INFO.is_file():
        return {}
    first = _CPU_INFO.read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _cpu_count() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _own_version() -> str:
    from trace_audit import __version__

    return __version__
