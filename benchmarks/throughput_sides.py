"""Everything that `throughput` runs: the model, the sides, and what is measured beside them."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_side import EngineSide, Recording, engine_config, load_engine_model
from benchmarks.floor import kv_bytes, linear_seconds, weight_bytes
from benchmarks.measure import copy_bandwidth, drop_from_cache, progress
from benchmarks.memory import Memory, PeakMemory
from benchmarks.models import open_model
from benchmarks.peer_process import PeerSide
from benchmarks.rounds import Entry, Rounds, Side, run_rounds
from benchmarks.shapes import SHAPES, random_config
from benchmarks.throughput import OWN, wanted
from benchmarks.transformers_side import Generate, GenerateBatch, NotRun
from benchmarks.workload import Workload, random_prompts, text_prompts
from trace_audit.models.pretrained import check_context, torch_dtype
from trace_audit.run_setup import apply_process_settings

_SHAPE_CONTEXT = 128
_PEER_SPARE_BYTES = 16 * 1024**3  # activations, graphs and the context of a CUDA process


class Bench:
    """A model, a workload, and the sides that were asked for.

    Args:
        options: the command line, its device decided.

    Raises:
        TraceAuditError: model, configuration or machine do not allow it.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        dtype = torch_dtype(options.dtype)
        self.model = open_model(
            options.model, dtype=dtype, device=self.device, directory=options.directory
        )
        self.workload = Workload(
            prompts=tuple(tuple(ids) for ids in self._prompts()), num_tokens=options.tokens
        )
        check_context(self.model.plain.config, self.workload.longest)
        self.config = engine_config(
            self.workload,
            device=options.device,
            dtype=options.dtype,
            attention_backend=options.attention_backend,
            sets=options.sets,
        )
        apply_process_settings(self.config)
        drop_from_cache(self.model.files())
        progress(f"{self.model.name}: loading it into the engine")
        self.loaded, seconds = load_engine_model(self.model.source, self.config.engine)
        self.model.loading["engine_seconds"] = seconds
        self.backends: dict[str, str] = {}
        self.memory: Memory | None = None
        self._recording: Recording | None = None
        self._replay: EngineSide | None = None
        self._open = ExitStack()

    @property
    def weight_bytes(self) -> int | None:
        """Bytes of weights a step reads; None where what is read is not the plain weights."""
        if self.config.engine.quantization != "none" or self.loaded.experts != "none":
            return None
        return weight_bytes(self.model.plain)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values a step reads, on average over the steps."""
        return kv_bytes(
            self.loaded.layers, self.workload.mean_contexts, self.config.engine.kv_cache_dtype
        )

    def run(self) -> Rounds:
        """Start every side, then run the rounds."""
        entries = [
            Entry(name=name, make=partial(self._make, name), is_own=name in OWN)
            for name in wanted(self.options)
        ]
        with self._open:
            for entry in entries:
                entry.start()
            return run_rounds(entries, self._beside(), self.options.rounds)

    def _prompts(self) -> list[list[int]]:
        context, directory = self.options.context, self.model.directory
        if context is None and self.options.model not in SHAPES:
            assert directory is not None
            return text_prompts(directory, self.options.rows)
        return random_prompts(
            self.options.rows, context or _SHAPE_CONTEXT, self.model.vocabulary_size
        )

    def _beside(self) -> dict[str, Callable[[], float]]:
        """Bandwidth, and the linear layers alone: the engine's own where they are not torch's."""
        beside: dict[str, Callable[[], float]] = {
            "bandwidth": partial(copy_bandwidth, self.device),
            "linear_torch": partial(linear_seconds, self.model.plain, self.workload.rows),
        }
        if self.loaded.linear == "onednn-packed":
            beside["linear_packed"] = partial(linear_seconds, self.loaded.model, self.workload.rows)
        return beside

    def _make(self, name: str) -> Side:
        if name in OWN:
            return self._own(name)
        logprobs = self.options.logprobs
        if name == "vllm":
            side: Any = PeerSide(
                name, self._peer_job(), self.workload, python=self.options.peer_python
            )
        elif name == "generate-batch":
            side = GenerateBatch(name, self.model.plain, self.workload, logprobs=logprobs)
        else:
            cache = "static" if name == "generate-static" else "dynamic"
            side = Generate(name, self.model.plain, self.workload, cache, logprobs=logprobs)
        self._open.callback(side.close)
        side.start()
        return side  # type: ignore[no-any-return]

    def _own(self, name: str) -> EngineSide:
        """One of the engine's sides, warm."""
        if name == "replay":
            self._recorded()
            assert self._replay is not None
            side = self._replay
        else:
            recording = None if name == "free" else self._recorded()
            side = EngineSide(
                name, self.loaded, self.config, self.workload, recording, audits=name == "free"
            )
            side.run()
        self.backends = side.built.backends
        return side

    def _recorded(self) -> Recording:
        """What the replaying engine recorded, once; it replayed it, too, and is warm."""
        if self._recording is None:
            # It holds no trace yet, but is an engine that may.
            nothing = Recording(traces=[], supports=[])
            watch = PeakMemory(self.device)
            self._replay = EngineSide("replay", self.loaded, self.config, self.workload, nothing)
            self._recording = self._replay.record()
            self._replay.replays(self._recording)
            self._replay.run()
            self.memory = watch.memory(self.loaded.model, self._replay.kv_cache_bytes)
        return self._recording

    def _peer_job(self) -> dict[str, Any]:
        directory = self.model.directory
        if directory is None:
            # A shape in memory: vLLM makes weights of its own from the config.
            scratch = self._open.enter_context(tempfile.TemporaryDirectory())
            random_config(self.model.name).save_pretrained(scratch)
            directory = Path(scratch)
        if self.config.engine.quantization != "none":
            raise NotRun("the peer would run the weights unquantized")
        return {
            "model": str(directory),
            "dtype": self.options.dtype,
            "load_format": "dummy" if self.model.directory is None else "auto",
            "max_num_batched_tokens": self.config.engine.max_num_batched_tokens,
            "gpu_memory_utilization": self._peer_memory(),
            "logprobs": self.options.peer_logprobs,
        }

    def _peer_memory(self) -> float:
        """The share of the GPU that the peer needs beside what is already there."""
        if self.device.type != "cuda":
            return 0.5
        total = torch.cuda.get_device_properties(self.device).total_memory
        weights = sum(parameter.nbytes for parameter in self.model.plain.parameters())
        needed: float = weights + 1.5 * self.kv_bytes + _PEER_SPARE_BYTES
        return min(0.9, needed / total)
