"""What the KV cache is made of, and how many blocks of it fit into memory."""

from __future__ import annotations

import os

import torch

from trace_audit.config import EngineConfig
from trace_audit.engine.model_runner import kv_block_bytes
from trace_audit.errors import ConfigError
from trace_audit.models.loaded import LoadedModel
from trace_audit.parallel.world import World

_CPU_MEMORY_SHARE = 0.5  # of the free memory, for the KV cache
KV_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_per_token_head": torch.float8_e4m3fn,
    "int8": torch.int8,
}
"""What the cache is made of, by the value of `kv_cache_dtype`."""


def stored_dtype(loaded: LoadedModel, config: EngineConfig) -> str:
    """What the cache stores, as `kv_cache_dtype` names it."""
    if config.kv_cache_dtype != "auto":
        return config.kv_cache_dtype
    return _own_dtype(loaded)


def _own_dtype(loaded: LoadedModel) -> str:
    names = {dtype: name for name, dtype in KV_DTYPES.items() if dtype.itemsize > 1}
    return names[next(loaded.model.parameters()).dtype]


def block_bytes(
    loaded: LoadedModel, draft: LoadedModel | None, config: EngineConfig, kv_cache_dtype: str
) -> int:
    """Bytes of one KV block over all layers, those of a draft model included.

    Args:
        kv_cache_dtype: what the model's own cache stores, by its name.
    """
    own = kv_block_bytes(loaded.layers, config.block_size, kv_cache_dtype)
    if draft is None:
        return own
    # A draft model's keys and values stand in blocks of their own, as many of them.
    return own + kv_block_bytes(draft.layers, config.block_size, _own_dtype(draft))


def num_blocks(
    config: EngineConfig, bytes_of_block: int, device: torch.device, world: World
) -> int:
    """Enough blocks for every slot at full length, or as many as memory holds.

    Raises:
        ConfigError: memory holds less than was asked for, or than one sequence needs.
    """
    per_sequence = -(-config.max_model_len // config.block_size)
    # The cache has one block more than there is to give away, for padding.
    room = _memory_budget(config, device) // _num_sharing(world)
    fitting = max(0, room // bytes_of_block - 1)
    if config.num_kv_blocks > fitting:
        raise ConfigError(
            f"num_kv_blocks = {config.num_kv_blocks} does not fit: the free memory holds {fitting}",
            hint="leave num_kv_blocks at 0, which fits it to memory",
        )
    if fitting < per_sequence:
        raise ConfigError(
            f"the free memory holds {fitting} KV blocks and one sequence of "
            f"{config.max_model_len} tokens needs {per_sequence}",
            hint="use shorter sequences, smaller blocks or a smaller kv_cache_dtype, or free some "
            "memory",
        )
    return config.num_kv_blocks or min(config.num_slots * per_sequence, fitting)


def _num_sharing(world: World) -> int:
    """Ranks that may live in the memory this rank sees: all, unless each has a GPU of its own."""
    return 1 if world.transport == "nccl" else world.all.size


def _memory_budget(config: EngineConfig, device: torch.device) -> int:
    """Bytes that the KV cache may take."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - total * (1 - config.gpu_memory_utilization)))
    return int(available_memory() * _CPU_MEMORY_SHARE)


def available_memory() -> int:
    """Bytes the host could still give without swapping."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except FileNotFoundError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
