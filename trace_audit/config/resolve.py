"""Automatic values decided for one machine and one trace."""

from __future__ import annotations

from dataclasses import dataclass

from trace_audit.config.model import EngineConfig, RunConfig
from trace_audit.config.overrides import override
from trace_audit.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What `resolve` needs to know of a machine.

    Attributes:
        cuda_available: a CUDA device can be used.
        cuda_device_name: its name, None without one.
        cpu_count: the cores this process may use.
    """

    cuda_available: bool
    cuda_device_name: str | None
    cpu_count: int


def resolve(config: RunConfig, *, hardware: Hardware, max_sequence_len: int) -> RunConfig:
    """Decide every automatic value, except `num_kv_blocks`, which the engine fits to memory.

    Args:
        max_sequence_len: the longest prompt plus output of the trace, in tokens.

    Raises:
        ConfigError: this machine or these lengths cannot honour the configuration.
    """
    engine = config.engine
    device = engine.device
    if device == "auto":
        device = "cuda" if hardware.cuda_available else "cpu"
    _check_machine(engine, device, hardware)
    _check_sizes(engine, max_sequence_len)
    backend = engine.attention_backend
    if backend == "auto":
        backend = "triton" if device == "cuda" else "sdpa"
    decided = {
        "engine.device": device,
        "engine.attention_backend": backend,
        "engine.lm_head_dtype": (
            engine.dtype if engine.lm_head_dtype == "auto" else engine.lm_head_dtype
        ),
        "engine.num_threads": engine.num_threads or hardware.cpu_count,
        "engine.max_model_len": engine.max_model_len or max_sequence_len,
        "engine.shard_size": engine.shard_size or 8 * engine.max_num_seqs,
    }
    return override(config, decided)


def _check_machine(engine: EngineConfig, device: str, hardware: Hardware) -> None:
    if device == "cuda" and not hardware.cuda_available:
        raise ConfigError(
            'device = "cuda" was asked for and this machine has no usable CUDA device',
            hint='use device = "auto" or device = "cpu"',
        )
    if engine.num_threads > hardware.cpu_count:
        raise ConfigError(
            f"num_threads = {engine.num_threads} is more than the {hardware.cpu_count} cores this "
            "process may use",
            hint="leave num_threads at 0, which takes all of them",
        )
    if device == "cpu" and engine.matmul_precision == "high":
        raise ConfigError(
            'matmul_precision = "high" means TF32, which a CPU does not compute',
            hint='use matmul_precision = "highest", or a CUDA device',
        )


def _check_sizes(engine: EngineConfig, max_sequence_len: int) -> None:
    if engine.max_num_batched_tokens < engine.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens = {engine.max_num_batched_tokens} is less than "
            f"max_num_seqs = {engine.max_num_seqs}, so a full decode batch would not fit",
            hint="raise max_num_batched_tokens or lower max_num_seqs",
        )
    if 0 < engine.max_model_len < max_sequence_len:
        raise ConfigError(
            f"max_model_len = {engine.max_model_len} is less than the {max_sequence_len} tokens "
            f"of the longest sequence",
            hint="leave max_model_len at 0, which takes what the trace needs",
        )
    needed = -(-max_sequence_len // engine.block_size)
    if 0 < engine.num_kv_blocks < needed:
        raise ConfigError(
            f"num_kv_blocks = {engine.num_kv_blocks} cannot hold one sequence of "
            f"{max_sequence_len} tokens, which needs {needed} blocks of {engine.block_size}",
            hint="raise num_kv_blocks, or leave it at 0 to fit it to memory",
        )
