"""Fixtures of every test. Triton must know before its import whether it is interpreted."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _num_cuda_devices() -> int:
    if os.environ.get("TRACE_AUDIT_TEST_DEVICE") == "cpu":
        return 0
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


NUM_CUDA_DEVICES = _num_cuda_devices()
HAS_CUDA = NUM_CUDA_DEVICES > 0
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.keywords and NUM_CUDA_DEVICES < 1:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if "multigpu" in item.keywords and NUM_CUDA_DEVICES < 2:
            item.add_marker(pytest.mark.skip(reason="fewer than two CUDA devices"))


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


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer."""
    from tests.tiny import save_tiny, save_tokenizer

    directory = tmp_path_factory.mktemp("model")
    save_tiny(directory, "llama")
    return save_tokenizer(directory)


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten prompts of every kind."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines: list[dict[str, object]] = [
        {"id": "text", "prompt": "hello"},
        {"id": "chat", "messages": [{"role": "user", "content": "two and two?"}]},
        {"id": "ids", "prompt_token_ids": [10, 20, 30, 40]},
        {"id": "long", "prompt": "the quick brown fox jumps over the lazy dog " * 2},
    ]
    lines += [{"prompt": f"number {i} of some more"} for i in range(4, 10)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory, model: Path, prompts: Path) -> Path:
    """An audit of them, to be read only."""
    from tests.commands import SMALL, run

    audit = tmp_path_factory.mktemp("recorded") / "audit"
    run(
        "record", model, "--prompts", prompts, "-o", audit, "--max-tokens", 12, "--ignore-eos",
        "--set", "device=cpu", *SMALL,
    )  # fmt: skip
    return audit


@pytest.fixture
def audit(recorded: Path, tmp_path: Path) -> Path:
    """A copy of it to write to."""
    return Path(shutil.copytree(recorded, tmp_path / "audit"))
