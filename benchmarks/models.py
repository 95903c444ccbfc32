"""The model of a benchmark: a directory, the demo model, or a shape with random weights."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.measure import drop_from_cache, plain_read, progress, synchronize
from benchmarks.shapes import SHAPES, random_model, save_random_model
from benchmarks.transformers_side import without_defaults
from trace_audit.models.pretrained import quiet_transformers
from trace_audit.run_setup import find_model


@dataclass(frozen=True, kw_only=True)
class BenchModel:
    """A model that every side decodes with.

    Attributes:
        name: as it was asked for.
        directory: where its files are; None for one made in memory.
        plain: as transformers has it, with sdpa attention, on the device.
        loading: how long that took, and how fast its files are read by nobody in particular.
    """

    name: str
    directory: Path | None
    plain: Any
    loading: dict[str, Any]

    @property
    def source(self) -> Any:
        """What the engine loads: the directory, or the weights in memory."""
        return self.directory or self.plain

    @property
    def vocabulary_size(self) -> int:
        """Width of the logits."""
        return int(self.plain.get_output_embeddings().weight.shape[0])

    def files(self) -> list[Path]:
        """Its weights; none for one made in memory."""
        return [] if self.directory is None else sorted(self.directory.glob("*.safetensors"))


def open_model(
    name: str, *, dtype: torch.dtype, device: torch.device, directory: Path | None = None
) -> BenchModel:
    """Load or make a model as transformers has it.

    Args:
        name: a model directory, `demo`, a hub id, or one of `SHAPES`.
        dtype, device: of the weights.
        directory: where to write a shape's checkpoint, which is then loaded; None: in memory.

    Raises:
        ModelError: there is no such model.
    """
    if name in SHAPES and directory is None:
        progress(f"{name}: making random weights on {device}")
        start = time.perf_counter()
        model = random_model(name, dtype=dtype, device=device)
        synchronize(device)
        loading: dict[str, Any] = {"made_in_memory_seconds": time.perf_counter() - start}
        return BenchModel(name=name, directory=None, plain=without_defaults(model), loading=loading)
    if name in SHAPES:
        assert directory is not None
        progress(f"{name}: writing random weights to {directory}")
        where = save_random_model(name, directory / name, device=device)
    else:
        where = find_model(name).directory
    return _load(name, where, dtype, device)


def _load(name: str, where: Path, dtype: torch.dtype, device: torch.device) -> BenchModel:
    files = sorted(where.glob("*.safetensors"))
    progress(f"{name}: reading {len(files)} files, then loading them")
    read = plain_read(files)
    drop_from_cache(files)
    start = time.perf_counter()
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            where, dtype=dtype, attn_implementation="sdpa", local_files_only=True
        )
    model = model.to(device).eval()
    synchronize(device)
    loading = {
        "file_bytes": sum(path.stat().st_size for path in files),
        "plain_read_bytes_per_second": read,
        "transformers_seconds": time.perf_counter() - start,
    }
    return BenchModel(name=name, directory=where, plain=without_defaults(model), loading=loading)
