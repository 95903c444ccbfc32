"""This project's engine as a side of a benchmark: replay, free decoding, and without an audit."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.measure import Stamps, Timing, step_seconds, synchronize
from benchmarks.workload import Workload
from trace_audit.attention.paged import PagedAttention
from trace_audit.config import EngineConfig, RunConfig, override, parse_set, resolve
from trace_audit.engine.build import BuiltEngine, build_engine
from trace_audit.engine.model_runner import ModelRunner
from trace_audit.engine.request import Request
from trace_audit.engine.sampling_params import SamplingParams
from trace_audit.engine.token_statistics import SUPPORT_TAIL_DRAWS, SUPPORT_TOP_K
from trace_audit.errors import ConfigError
from trace_audit.models.loaded import LoadedModel
from trace_audit.models.loader import load_model, ready_model
from trace_audit.models.pretrained import torch_dtype
from trace_audit.run_setup import hardware

# Prompts are prefilled in as few launches as this many tokens allow: rows that wait for others'
# prefills would decode in a batch that is not full.
LARGEST_LAUNCH = 65536
# Decided by the benchmark's own options and sides.
_DECIDED = {
    f"engine.{key}"
    for key in ("device", "dtype", "attention_backend", "max_num_seqs", "enable_trace_replay")
}


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What a replay is given.

    Attributes:
        traces: token ids of each row.
        supports: int32 [tokens, support] of each row.
    """

    traces: list[list[int]]
    supports: list[npt.NDArray[np.int32]]


def random_recording(workload: Workload, vocabulary_size: int) -> Recording:
    """Seeded tokens and supports, for who wants to know how long a replay takes and no more."""
    draw = np.random.default_rng(1)
    shape = (workload.rows, workload.num_tokens)
    num_support = SUPPORT_TOP_K + SUPPORT_TAIL_DRAWS
    # No id twice in a support.
    support = draw.permutation(vocabulary_size)[:num_support].astype(np.int32)
    return Recording(
        traces=draw.integers(0, vocabulary_size, shape).tolist(),
        supports=[np.tile(support, (workload.num_tokens, 1))] * workload.rows,
    )


def engine_config(
    workload: Workload, *, device: str, dtype: str, attention_backend: str, sets: Sequence[str]
) -> RunConfig:
    """A resolved configuration whose batch is the workload.

    Args:
        workload: what will run.
        device, dtype, attention_backend: as the configuration has them.
        sets: `KEY=VALUE` of other keys, as `--set` takes them.

    Raises:
        ConfigError: a key or value is wrong, is no engine's or not free, or does not decode.
    """
    prefill = max(workload.rows, *(len(prompt) for prompt in workload.prompts),
                  min(LARGEST_LAUNCH, sum(map(len, workload.prompts))))  # fmt: skip
    engine = EngineConfig(
        device=device,
        dtype=dtype,
        attention_backend=attention_backend,
        max_num_seqs=workload.rows,
        max_num_batched_tokens=max(2048, prefill),
    )
    changes, *others = parse_set(sets)
    if others:
        raise ConfigError("a benchmark takes one value a key", hint="run it once for each value")
    for key in changes:
        if not key.startswith("engine.") or key in _DECIDED:
            raise ConfigError(
                f"{key} cannot be set here",
                hint="keys of [engine] can, except those that the benchmark's options decide",
            )
    config = override(RunConfig(name="benchmark", engine=engine), changes)
    if config.engine.path != "decode":
        raise ConfigError(f'path = "{config.engine.path}" has no decode steps to measure')
    return resolve(config, hardware=hardware(None), max_sequence_len=workload.longest)


def load_engine_model(source: Any, config: EngineConfig) -> tuple[LoadedModel, float]:
    """The engine's model and the seconds it took.

    Args:
        source: a directory, or a transformers model in memory, whose weights are then shared.
        config: resolved.
    """
    device, dtype = torch.device(config.device), torch_dtype(config.dtype)
    how: dict[str, Any] = {
        "dtype": dtype,
        "device": device,
        "lm_head_dtype": torch_dtype(config.lm_head_dtype),
        "quantization": config.quantization,
        "compiled": config.compile,
        "fused": config.fused,
    }
    start = time.perf_counter()
    if isinstance(source, Path):
        loaded = load_model(source, moe_backend=config.moe_backend, **how)
    else:
        attention = PagedAttention()
        # A copy of the modules around the same parameters: packing and compiling replace modules.
        shared: dict[int, Any] = {id(p): p for p in source.parameters()}
        model = copy.deepcopy(source, shared)
        model.set_attn_implementation(attention.name)
        loaded = ready_model(model, attention, **how)
    synchronize(device)
    return loaded, time.perf_counter() - start


class EngineSide:
    """One engine over a model that others may use in turns.

    Args:
        name: of the row.
        loaded: the model.
        config: resolved.
        workload: what to decode.
        recording: what to replay; None: rows decode freely.
        audits: false for an engine that takes the likeliest token and keeps nothing of it. It is
            still given trace and support, whose way to the device is no part of the difference.
    """

    def __init__(
        self,
        name: str,
        loaded: LoadedModel,
        config: RunConfig,
        workload: Workload,
        recording: Recording | None,
        *,
        audits: bool = True,
    ) -> None:
        self.name = name
        self._workload = workload
        self._recording = recording
        self._loaded = loaded
        self._bind: Any = None
        self._kv_cache: Any = None
        engine = override(config, {"engine.enable_trace_replay": recording is not None}).engine
        runner = ModelRunner if audits else PlainRunner
        self.built: BuiltEngine = build_engine(
            loaded, engine, make_runner=partial(self._make_runner, runner)
        )
        if not audits:
            self.built.engine._outputs = _NoOutputs()  # type: ignore[assignment]
        self._check_room(engine)

    @property
    def kv_cache_bytes(self) -> int:
        """Of all its blocks, the null block with them."""
        return sum(tensor.nbytes for tensor in self._kv_cache.tensors)

    def run(self) -> Timing:
        """Decode or replay every row once."""
        return self._timed(self._recording)[0]

    def record(self) -> Recording:
        """Decode every row freely once, as `trace-audit record` does."""
        outputs = self._timed(None)[1]
        return Recording(
            traces=[output.token_ids.tolist() for output in outputs],
            supports=[output.support_token_ids for output in outputs],
        )

    def replays(self, recording: Recording) -> None:
        """Replay this from now on."""
        self._recording = recording

    def _timed(self, recording: Recording | None) -> tuple[Timing, list[Any]]:
        device = next(self._loaded.model.parameters()).device
        self._bind()
        stamps, committed = Stamps(device), []

        def on_tokens(count: int) -> None:
            stamps.mark()
            committed.append(count)

        synchronize(device)
        start = time.perf_counter()
        outputs = self.built.engine.run(self._requests(recording), on_tokens)
        synchronize(device)
        seconds = time.perf_counter() - start
        step = step_seconds(stamps.seconds(), committed, self._workload.rows)
        return Timing(seconds=seconds, step_seconds=step), outputs

    def _requests(self, recording: Recording | None) -> list[Request]:
        return [
            self.built.input_processor.process(
                str(i),
                prompt,
                SamplingParams(
                    max_tokens=self._workload.num_tokens,
                    ignore_eos=True,
                    trace_decode_token_ids=None if recording is None else recording.traces[i],
                ),
                index=i,
                support_token_ids=None if recording is None else recording.supports[i],
            )
            for i, prompt in enumerate(self._workload.prompts)
        ]

    def _make_runner(self, runner: type[ModelRunner], **arguments: Any) -> ModelRunner:
        # Engines share the model's attention: each binds its own cache before it runs.
        attention, self._kv_cache = arguments["loaded"].attention, arguments["kv_cache"]
        self._bind = partial(attention.bind, self._kv_cache, arguments["backend"])
        return runner(**arguments)

    def _check_room(self, engine: EngineConfig) -> None:
        """Refuse a cache that cannot hold the whole batch: preemption would be measured."""
        needed = self._workload.rows * -(-self._workload.longest // engine.block_size)
        if self.built.num_kv_blocks < needed:
            raise ConfigError(
                f"{self._workload.rows} rows of {self._workload.longest} tokens need {needed} KV "
                f"blocks, and memory holds {self.built.num_kv_blocks}",
                hint="use fewer rows or a shorter context",
            )


class PlainRunner(ModelRunner):
    """Takes the likeliest token: no overwrite, no statistics."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._sample_by(_likeliest)  # type: ignore[arg-type]


def _likeliest(logits: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
    return logits.argmax(-1), None


class _NoOutputs:
    """Keeps no row of any step."""

    def start(self, max_full_logprobs: int) -> None:
        """See `OutputBuffer`."""

    def add(self, output: Any) -> None:
        """See `OutputBuffer`."""

    def collect_expert_ids(self) -> None:
        """See `OutputBuffer`."""

    def collect(self, requests: list[Request], expert_ids: None = None) -> list[Any]:
        """The traces, as if they had been committed: nobody asks this engine what was."""
        return [SimpleNamespace(token_ids=np.array(request.trace)) for request in requests]
