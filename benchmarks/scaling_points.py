"""The points of `scaling`: one batch of one model each, and what its decode step takes."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.engine_side import (
    EngineSide,
    engine_config,
    load_engine_model,
    random_recording,
)
from benchmarks.floor import kv_bytes, weight_bytes
from benchmarks.machine import machine
from benchmarks.measure import Spread, copy_bandwidth, progress
from benchmarks.models import BenchModel, open_model
from benchmarks.workload import Workload, random_prompts
from trace_audit.config import RunConfig
from trace_audit.errors import ConfigError
from trace_audit.models.loaded import LoadedModel
from trace_audit.models.pretrained import check_context, torch_dtype
from trace_audit.run_setup import apply_process_settings

GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Point:
    """One batch.

    Attributes:
        sweep: which size it is a point of.
        shape, rows, context: what it is.
        weight_gb, kv_gb: bytes that a step reads, 1e9 of them.
        floor_ms: those bytes over the bandwidth measured just before.
        step_ms: of a decode step; None where it was not run.
        not_run: why it was not.
    """

    sweep: str
    shape: str
    rows: int
    context: int
    weight_gb: float
    kv_gb: float
    floor_ms: float
    step_ms: Spread | None = None
    not_run: str | None = None

    @property
    def size(self) -> float:
        """What the sweep varies."""
        return {"rows": self.rows, "context": self.context, "weights": self.weight_gb}[self.sweep]


class ShapeBench:
    """A model of one shape, whose batches come and go.

    Args:
        options: the command line, its device decided.
        shape: of random weights, made in memory.

    Raises:
        ConfigError: the configuration cannot be, at any size.
    """

    def __init__(self, options: argparse.Namespace, shape: str) -> None:
        self._options = options
        self._device = torch.device(options.device)
        dtype = torch_dtype(options.dtype)
        self._model: BenchModel = open_model(shape, dtype=dtype, device=self._device)
        self.config = self._config(self._workload(1, 1))
        if self.config.engine.quantization != "none":
            raise ConfigError("the floor of quantized weights is not known here",
                              hint="leave quantization at none")  # fmt: skip
        apply_process_settings(self.config)
        self._loaded: LoadedModel = load_engine_model(self._model.source, self.config.engine)[0]

    def measure(self, sweep: str, rows: int, context: int) -> Point:
        """The time of a step of one batch; a batch that memory does not hold is not run."""
        workload = self._workload(rows, context)
        weights = weight_bytes(self._model.plain)
        keys = kv_bytes(
            self._loaded.layers, workload.mean_contexts, self.config.engine.kv_cache_dtype
        )
        point = Point(
            sweep=sweep,
            shape=self._model.name,
            rows=rows,
            context=context,
            weight_gb=weights / GB,
            kv_gb=keys / GB,
            floor_ms=1000 * (weights + keys) / copy_bandwidth(self._device),
        )
        try:
            steps = self._steps(workload)
        except (ConfigError, torch.OutOfMemoryError) as error:
            point = replace(point, not_run=str(error).strip().splitlines()[0])
        else:
            point = replace(point, step_ms=Spread.of([1000 * step for step in steps]))
        return point

    def _steps(self, workload: Workload) -> list[float]:
        """A step's seconds in each round, after one to warm up.

        Raises:
            ConfigError: the model's context, the cache or the tokens are too few.
        """
        check_context(self._model.plain.config, workload.longest)
        config = self._config(workload)
        # The attention still holds the cache of the batch before, which may fill the memory.
        self._loaded.attention._cache = None
        free_memory()
        recording = random_recording(workload, self._model.vocabulary_size)
        side = EngineSide("replay", self._loaded, config, workload, recording)
        side.run()
        steps = [side.run().step_seconds for _ in range(self._options.rounds)]
        there = [step for step in steps if step is not None]
        if len(there) < len(steps):
            raise ConfigError(f"{workload.num_tokens} tokens are over before every row decodes",
                              hint="raise --tokens")  # fmt: skip
        return there

    def _workload(self, rows: int, context: int) -> Workload:
        prompts = random_prompts(rows, context, self._model.vocabulary_size)
        return Workload(prompts=tuple(map(tuple, prompts)), num_tokens=self._options.tokens)

    def _config(self, workload: Workload) -> RunConfig:
        return engine_config(
            workload,
            device=self._options.device,
            dtype=self._options.dtype,
            attention_backend=self._options.attention_backend,
            sets=self._options.sets,
        )


def measured(options: argparse.Namespace) -> tuple[list[Point], dict[str, Any]]:
    """All points, shape by shape, and the environment they were measured in.

    Raises:
        ConfigError: the configuration cannot be, at any size.
    """
    points: list[Point] = []
    environment: dict[str, Any] = {}
    for shape in options.shapes:
        bench = ShapeBench(options, shape)
        for sweep, rows, context in wanted(options, shape):
            point = bench.measure(sweep, rows, context)
            took = point.not_run or (point.step_ms and f"{point.step_ms.text(2)} ms a step")
            progress(f"{shape}, {rows} rows, context {context}: {took}")
            points.append(point)
        environment = machine(bench.config)
        del bench
        free_memory()
    return points, environment


def wanted(options: argparse.Namespace, shape: str) -> Iterator[tuple[str, int, int]]:
    """Sweep, rows and context of a shape's points: the first shape has all of them."""
    if shape == options.shapes[0]:
        yield from (("rows", rows, options.base_context) for rows in options.rows)
        yield from (("context", options.base_rows, context) for context in options.contexts)
    yield "weights", options.base_rows, options.base_context


def free_memory() -> None:
    """Give memory back before the next point asks for it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
