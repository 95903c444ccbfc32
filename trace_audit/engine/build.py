"""From a resolved configuration and a loaded model to an engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from trace_audit.attention.base import AttentionBackend
from trace_audit.attention.eager import EagerAttention
from trace_audit.attention.sdpa import SdpaAttention
from trace_audit.attention.triton import TritonAttention
from trace_audit.config import EngineConfig
from trace_audit.engine.engine import Engine
from trace_audit.engine.input_processor import InputProcessor
from trace_audit.engine.model_runner import ModelRunner, kv_block_bytes
from trace_audit.engine.trace_replay import ApplyTrace
from trace_audit.errors import ConfigError
from trace_audit.kernels import reference, token_stats
from trace_audit.kernels.runtime import can_run_triton, kernel_mode
from trace_audit.kernels.trace_replay import apply_trace_tokens
from trace_audit.models.loader import LoadedModel
from trace_audit.parallel.world import World, single_world

_CPU_MEMORY_SHARE = 0.5  # of the free memory, for the KV cache

MakeRunner: TypeAlias = Callable[..., ModelRunner]
"""`ModelRunner`, or what takes its arguments and gives one."""


@dataclass(frozen=True, kw_only=True)
class BuiltEngine:
    """An engine and what it was made of.

    Attributes:
        engine: ready to run.
        input_processor: makes its requests.
        num_kv_blocks: blocks of the cache, fitted if the configuration said 0.
        backends: what really runs, by part, for run.json.
    """

    engine: Engine
    input_processor: InputProcessor
    num_kv_blocks: int
    backends: dict[str, str]


def build_engine(
    loaded: LoadedModel,
    config: EngineConfig,
    world: World | None = None,
    *,
    make_runner: MakeRunner = ModelRunner,
) -> BuiltEngine:
    """Build an engine; where there are ranks, every one of them at the same time.

    Args:
        loaded: the model, or this rank's share of it.
        config: resolved: no "auto", no 0 but `num_kv_blocks`.
        world: this rank's place; None: there are no ranks.
        make_runner: what runs the launches.

    Raises:
        ConfigError: the model or the machine cannot honour the configuration.
    """
    world = world or single_world()
    device = next(loaded.model.parameters()).device
    # One schedule for all: the rank with the least room decides.
    num_blocks = min(world.all.gather_objects(_num_blocks(loaded, config, device, world)))
    backend = _backend(config.attention_backend, device)
    # Interpreted kernels cost time, the vocabulary-wide ones far too much: only on request.
    interpreted = device.type == "cpu" and config.attention_backend != "triton"
    use_reference = interpreted or not can_run_triton(device)
    runner = make_runner(
        loaded=loaded,
        world=world,
        backend=backend,
        statistics_kernels=reference if use_reference else token_stats,
        max_num_reqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        num_blocks=num_blocks,
        block_size=config.block_size,
        apply_trace=_overwrite(config, use_reference),
    )
    engine = Engine(
        runner=runner,
        world=world,
        num_blocks=num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        swap=config.preemption == "swap",
    )
    return BuiltEngine(
        engine=engine,
        input_processor=InputProcessor(
            vocabulary_size=loaded.vocabulary_size,
            max_model_len=config.max_model_len,
            eos_token_ids=loaded.eos_token_ids,
            enable_trace_replay=config.enable_trace_replay,
        ),
        num_kv_blocks=num_blocks,
        backends={
            "device": str(device),
            "attention": backend.name,
            "linear": loaded.linear,
            "weights": loaded.weights,
            "transport": world.transport,
            "trace_replay": "reference" if use_reference else kernel_mode(device),
            "token_statistics": "reference" if use_reference else kernel_mode(device),
        },
    )


def _overwrite(config: EngineConfig, use_reference: bool) -> ApplyTrace | None:
    if not config.enable_trace_replay:
        return None
    # Interpreted, the kernel is as exact and costs a CPU 3 % of a decode step.
    return reference.apply_trace_tokens if use_reference else apply_trace_tokens


def _backend(name: str, device: torch.device) -> AttentionBackend:
    if name == "eager":
        return EagerAttention()
    if name == "sdpa":
        return SdpaAttention()
    if name == "triton":
        if not can_run_triton(device):
            raise ConfigError(
                f"attention_backend triton cannot run on {device.type} in this process",
                hint='triton needs Linux; use attention_backend = "sdpa" or "eager"',
            )
        return TritonAttention()
    raise ConfigError(f"attention_backend {name!r} is not one of eager, sdpa, triton")


def _num_blocks(
    loaded: LoadedModel, config: EngineConfig, device: torch.device, world: World
) -> int:
    """Enough blocks for every slot at full length, or as many as memory holds."""
    per_sequence = -(-config.max_model_len // config.block_size)
    dtype = next(loaded.model.parameters()).dtype
    block_bytes = kv_block_bytes(loaded.layers, config.block_size, dtype)
    fitting = _memory_budget(config, device) // _num_sharing(world) // block_bytes
    if config.num_kv_blocks > fitting:
        raise ConfigError(
            f"num_kv_blocks = {config.num_kv_blocks} does not fit: the free memory holds {fitting}",
            hint="leave num_kv_blocks at 0, which fits it to memory",
        )
    if fitting < per_sequence:
        raise ConfigError(
            f"the free memory holds {fitting} KV blocks and one sequence of "
            f"{config.max_model_len} tokens needs {per_sequence}",
            hint="use shorter sequences or a smaller dtype, or free some memory",
        )
    return config.num_kv_blocks or min(config.max_num_seqs * per_sequence, fitting)


def _num_sharing(world: World) -> int:
    """Ranks that may live in the memory this rank sees: all, unless each has a GPU of its own."""
    return 1 if world.transport == "nccl" else world.all.size


def _memory_budget(config: EngineConfig, device: torch.device) -> int:
    """Bytes that the KV cache may take."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - total * (1 - config.gpu_memory_utilization)))
    return int(_available_memory() * _CPU_MEMORY_SHARE)


def _available_memory() -> int:
    """Bytes the host could still give without swapping."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except FileNotFoundError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
