"""Fixtures of every test. Triton must know before its import whether it is interpreted."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _cuda_is_available() -> bool:
    if os.environ.get("TRACE_AUDIT_TEST_DEVICE") == "cpu":
        return False
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


HAS_CUDA = _cuda_is_available()
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_CUDA:
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "gpu" in item.keywords or "multigpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def device():
    """The device whose Triton kernels can run in this process."""
    import torch

    return torch.device("cuda" if HAS_CUDA else "cpu")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint(family)` is the directory of a seeded tiny model, made once a session."""
    from tests.tiny import save_tiny

    made: dict[str, Path] = {}

    def get(family: str = "llama") -> Path:
        if family not in made:
            made[family] = save_tiny(tmp_path_factory.mktemp(family), family)
        return made[family]

    return get
