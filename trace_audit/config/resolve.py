"""Automatic values decided for one machine and one trace."""

from __future__ import annotations

from dataclasses import dataclass

from trace_audit.config.model import EngineConfig, ParallelConfig, RunConfig
from trace_audit.config.overrides import override
from trace_audit.config.scoring import check_scoring
from trace_audit.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What `resolve` needs to know of a machine.

    Attributes:
        cuda_available: a CUDA device can be used.
        cuda_device_name: its name, None without one.
        cpu_count: the cores this process may use.
        num_cuda_devices: devices of this machine.
        num_local_ranks: ranks of the run on this machine; None: all of them.
    """

    cuda_available: bool
    cuda_device_name: str | None
    cpu_count: int
    num_cuda_devices: int = 1
    num_local_ranks: int | None = None


def resolve(config: RunConfig, *, hardware: Hardware, max_sequence_len: int) -> RunConfig:
    """Decide every automatic value, except `num_kv_blocks`, which the engine fits to memory.

    Args:
        max_sequence_len: the longest prompt plus output of the trace, in tokens.

    Raises:
        ConfigError: this machine or these lengths cannot honour the configuration.
    """
    check_keys(config)
    engine = config.engine
    device = engine.device
    if device == "auto":
        device = "cuda" if hardware.cuda_available else "cpu"
    parallel = _resolved_parallel(config.parallel)
    local_ranks = hardware.num_local_ranks or parallel.num_processes
    _check_machine(engine, device, hardware)
    _check_devices(parallel, device, hardware, local_ranks)
    _check_sizes(engine, max_sequence_len)
    decided = {
        "engine.device": device,
        "engine.attention_backend": _attention_backend(engine, device),
        "engine.lm_head_dtype": (
            engine.dtype if engine.lm_head_dtype == "auto" else engine.lm_head_dtype
        ),
        "engine.kv_cache_dtype": (
            engine.dtype if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype
        ),
        "engine.num_threads": engine.num_threads or max(1, hardware.cpu_count // local_ranks),
        "engine.max_model_len": engine.max_model_len or max_sequence_len,
        "engine.shard_size": engine.shard_size or 8 * engine.max_num_seqs,
        "parallel.backend": parallel.backend,
        "parallel.reduction": parallel.reduction,
    }
    return override(config, decided)


def check_keys(config: RunConfig) -> None:
    """Refuse keys that contradict each other, whatever the machine, the model and the trace.

    Raises:
        ConfigError: two of them cannot both be honoured.
    """
    _check_speculative(config)
    _check_fixed_batch(config)
    _check_weights(config)
    _check_path(config)
    check_scoring(config.scoring)
    _resolved_parallel(config.parallel)


def _check_fixed_batch(config: RunConfig) -> None:
    method = config.speculative.method
    if config.engine.fixed_batch and method != "none":
        raise ConfigError(
            f'fixed_batch = true and speculative.method = "{method}": how many drafts the others '
            "have decides the shape of a launch",
            hint='use speculative.method = "none", or fixed_batch = false',
        )


def _check_weights(config: RunConfig) -> None:
    engine, parallel = config.engine, config.parallel
    has_ranks = parallel.world_size > 1 or parallel.backend in ("process", "emulated")
    if engine.quantization != "none" and parallel.tensor_parallel_size > 1:
        raise ConfigError(
            f'quantization = "{engine.quantization}" and tensor_parallel_size = '
            f"{parallel.tensor_parallel_size}: a rank's shard would have scales of its own, and "
            "the model would be another one for every number of ranks",
            hint="use tensor_parallel_size = 1; pipeline stages hold whole layers",
        )
    if engine.fused and (engine.compile or engine.quantization != "none"):
        other = "compile = true" if engine.compile else f'quantization = "{engine.quantization}"'
        raise ConfigError(
            f"fused = true replaces the decoder layers, and {other} changes those of transformers",
            hint="use one of the two",
        )
    if engine.fused and has_ranks:
        raise ConfigError(
            "fused = true merges weights of a model that is whole, and ranks hold shards of it "
            f'({parallel.world_size} of them, backend = "{parallel.backend}")',
            hint='use one rank and backend = "single", or fused = false',
        )
    if engine.compile and has_ranks:
        raise ConfigError(
            "compile = true compiles a model that is whole, and ranks hold shards of it "
            f'({parallel.world_size} of them, backend = "{parallel.backend}")',
            hint='use one rank and backend = "single", or compile = false',
        )


def _check_path(config: RunConfig) -> None:
    engine = config.engine
    if engine.path == "decode":
        if engine.prefill_chunk:
            raise ConfigError(
                f'prefill_chunk = {engine.prefill_chunk} has no effect with path = "decode"',
                hint='use path = "prefill"; max_num_batched_tokens cuts the prompts of "decode"',
            )
        return
    if not engine.enable_trace_replay:
        raise ConfigError(
            'path = "prefill" scores traces, and enable_trace_replay = false refuses them',
            hint="leave enable_trace_replay at true",
        )


def _check_speculative(config: RunConfig) -> None:
    speculative = config.speculative
    if speculative.method == "none":
        return
    if speculative.method == "draft_model" and not speculative.draft_model:
        raise ConfigError(
            'speculative.method = "draft_model" names no model',
            hint="give its directory or hub id as speculative.draft_model",
        )
    if (
        speculative.method == "ngram"
        and speculative.prompt_lookup_min > speculative.prompt_lookup_max
    ):
        raise ConfigError(
            f"prompt_lookup_min = {speculative.prompt_lookup_min} is more than "
            f"prompt_lookup_max = {speculative.prompt_lookup_max}, so no match can be long enough",
            hint="lower prompt_lookup_min or raise prompt_lookup_max",
        )
    if config.engine.path == "prefill":
        raise ConfigError(
            f'speculative.method = "{speculative.method}" drafts what is decoded, and '
            'path = "prefill" decodes nothing',
            hint='use path = "decode", or speculative.method = "none"',
        )


def _attention_backend(engine: EngineConfig, device: str) -> str:
    if engine.attention_backend != "auto":
        return engine.attention_backend
    return "triton" if device == "cuda" else "sdpa"


def _resolved_parallel(parallel: ParallelConfig) -> ParallelConfig:
    """Backend and reduction decided; without tensor parallelism nothing is ever reduced."""
    backend, reduction = parallel.backend, parallel.reduction
    if backend == "auto":
        backend = "single" if parallel.world_size == 1 else "process"
    if reduction == "auto" and parallel.tensor_parallel_size > 1:
        reduction = "native" if backend == "process" else "rank_order"
    resolved = parallel.model_copy(update={"backend": backend, "reduction": reduction})
    _check_backend(resolved)
    return resolved


def _check_backend(parallel: ParallelConfig) -> None:
    if parallel.backend == "single" and parallel.world_size > 1:
        raise ConfigError(
            f'backend = "single" is one rank, and tensor_parallel_size x pipeline_parallel_size = '
            f"{parallel.world_size}",
            hint='use backend = "process" or "emulated"',
        )
    if parallel.backend == "emulated" and parallel.reduction == "native":
        raise ConfigError(
            'reduction = "native" is what a communication library does, and backend = "emulated" '
            "has none",
            hint="use reduction = rank_order, ring or tree",
        )


def _check_devices(
    parallel: ParallelConfig, device: str, hardware: Hardware, local_ranks: int
) -> None:
    if parallel.backend != "process" or device != "cuda":
        return
    if local_ranks > hardware.num_cuda_devices:
        raise ConfigError(
            f'backend = "process" needs a CUDA device a rank: {local_ranks} ranks, and this '
            f"machine has {hardware.num_cuda_devices}",
            hint='use backend = "emulated", which computes every rank on one device',
        )


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
    if engine.path == "decode" and engine.max_num_batched_tokens < engine.max_num_seqs:
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
