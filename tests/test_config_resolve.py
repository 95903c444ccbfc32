"""Automatic values: what they become, and what a machine cannot honour."""

from __future__ import annotations

from typing import Any

import pytest

from trace_audit.config import (
    EngineConfig,
    Hardware,
    ParallelConfig,
    RunConfig,
    default_record_config,
    flat,
    override,
    resolve,
)
from trace_audit.errors import ConfigError

CPU = Hardware(cuda_available=False, cuda_device_name=None, cpu_count=6)
CUDA = Hardware(cuda_available=True, cuda_device_name="some device", cpu_count=6)


@pytest.mark.parametrize(
    ("hardware", "device", "backend"), [(CPU, "cpu", "sdpa"), (CUDA, "cuda", "triton")]
)
def test_resolve_decides_every_automatic_value(
    hardware: Hardware, device: str, backend: str
) -> None:
    config = RunConfig(name="x", engine=EngineConfig(dtype="bfloat16", max_num_seqs=4))
    engine = resolve(config, hardware=hardware, max_sequence_len=77).engine
    assert (engine.device, engine.attention_backend) == (device, backend)
    assert engine.lm_head_dtype == "bfloat16"
    assert engine.kv_cache_dtype == "bfloat16"
    assert engine.num_threads == 6
    assert engine.max_model_len == 77
    assert engine.shard_size == 32
    assert engine.num_kv_blocks == 0


@pytest.mark.parametrize(
    ("engine", "parallel", "told"),
    [
        ({"quantization": "fp8"}, {"tensor_parallel_size": 2}, "scales of its own"),
        ({"compile": True}, {"tensor_parallel_size": 2}, "a model that is whole"),
        ({"compile": True}, {"pipeline_parallel_size": 2}, "a model that is whole"),
        ({"compile": True}, {"backend": "process"}, "a model that is whole"),
        ({"compile": True}, {"backend": "emulated"}, "a model that is whole"),
        ({"quantization": "fp8", "compile": True}, {}, None),
        ({"quantization": "fp8"}, {"pipeline_parallel_size": 2}, None),
    ],
)
def test_what_ranks_cannot_quantize_or_compile(
    engine: dict[str, Any], parallel: dict[str, Any], told: str | None
) -> None:
    config = RunConfig(name="x", engine=EngineConfig(**engine), parallel=ParallelConfig(**parallel))
    if told is None:
        resolve(config, hardware=CPU, max_sequence_len=8)
        return
    with pytest.raises(ConfigError, match=told):
        resolve(config, hardware=CPU, max_sequence_len=8)


def test_resolve_keeps_what_was_asked_for() -> None:
    asked = EngineConfig(
        device="cpu",
        attention_backend="eager",
        lm_head_dtype="float32",
        kv_cache_dtype="int8",
        dtype="float16",
        num_threads=2,
        max_model_len=100,
        shard_size=3,
        num_kv_blocks=9,
    )
    parallel = ParallelConfig(
        tensor_parallel_size=2,
        backend="emulated",
        reduction="ring",
        reduction_dtype="float32",
        timeout_seconds=5,
    )
    config = RunConfig(name="x", engine=asked, parallel=parallel)
    assert resolve(config, hardware=CUDA, max_sequence_len=77) == config


def test_resolving_twice_changes_nothing() -> None:
    once = resolve(default_record_config(), hardware=CPU, max_sequence_len=50)
    assert resolve(once, hardware=CPU, max_sequence_len=50) == once


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"engine.device": "cuda"}, "no usable CUDA device"),
        ({"engine.matmul_precision": "high"}, "TF32"),
        ({"engine.max_num_batched_tokens": 31}, "max_num_seqs = 32"),
        ({"engine.max_model_len": 49}, "50 tokens"),
        ({"engine.num_kv_blocks": 3}, "needs 4 blocks"),
        ({"engine.prefill_chunk": 8}, 'prefill_chunk = 8 has no effect with path = "decode"'),
        ({"engine.path": "prefill", "engine.enable_trace_replay": False}, "scores traces"),
        ({"scoring.temperature": 0.7}, "scoring.temperature = 0.7 has no effect with scoring.mode"),
        ({"scoring.top_p": 0.9}, "scoring.top_p = 0.9 has no effect"),
        ({"scoring.top_k": 5}, "scoring.top_k = 5 has no effect"),
        ({"engine.fixed_batch": True, "speculative.method": "ngram"}, "the shape of a launch"),
    ],
)
def test_resolve_refuses_what_cannot_be_honoured(overrides: dict[str, object], said: str) -> None:
    config = override(default_record_config(), overrides)
    with pytest.raises(ConfigError, match=said):
        resolve(config, hardware=CPU, max_sequence_len=50)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"method": "draft_model"}, "names no model"),
        ({"method": "ngram", "prompt_lookup_min": 5}, "prompt_lookup_min = 5 is more than"),
        ({"method": "ngram", "engine.path": "prefill"}, "decodes nothing"),
        ({"method": "ngram", "engine.fixed_batch": True}, "fixed_batch = true"),
    ],
)
def test_resolve_refuses_drafts_that_mean_nothing(overrides: dict[str, object], said: str) -> None:
    changes = {k if "." in k else f"speculative.{k}": v for k, v in overrides.items()}
    with pytest.raises(ConfigError, match=said):
        resolve(override(default_record_config(), changes), hardware=CPU, max_sequence_len=50)


@pytest.mark.parametrize(
    "overrides",
    [
        {"draft_model": "x", "prompt_lookup_min": 5, "rejection": "probabilistic"},
        {"method": "ngram", "draft_model": "x", "prompt_lookup_min": 4},
        {"method": "draft_model", "draft_model": "x", "prompt_lookup_min": 5},
    ],
)
def test_keys_of_drafting_without_an_effect_are_accepted(overrides: dict[str, object]) -> None:
    changes = {f"speculative.{key}": value for key, value in overrides.items()}
    config = override(default_record_config(), changes)
    resolved = flat(resolve(config, hardware=CPU, max_sequence_len=50))
    assert {key: resolved[key] for key in changes} == changes


@pytest.mark.parametrize(
    "overrides",
    [
        {"engine.max_num_batched_tokens": 32},
        {"engine.max_model_len": 50},
        {"engine.num_kv_blocks": 4},
        {"engine.path": "prefill", "engine.prefill_chunk": 1},
        {"engine.path": "prefill", "engine.max_num_batched_tokens": 1},
        {"scoring.mode": "processed", "scoring.temperature": 0.01},
        {"scoring.mode": "processed", "scoring.top_k": 1, "scoring.top_p": 1e-6},
        {"engine.batch_order_seed": 2**31 - 1},
    ],
)
def test_resolve_accepts_the_smallest_that_fits(overrides: dict[str, object]) -> None:
    config = override(default_record_config(), overrides)
    resolved = flat(resolve(config, hardware=CPU, max_sequence_len=50))
    assert {key: resolved[key] for key in overrides} == overrides


def resolved(
    hardware: Hardware = CPU, *, num_threads: int = 0, device: str = "auto", **parallel: Any
) -> RunConfig:
    """The resolved configuration of `[parallel]` keys."""
    changes = {f"parallel.{key}": value for key, value in parallel.items()}
    changes |= {"engine.num_threads": num_threads, "engine.device": device}
    config = override(default_record_config(), changes)
    return resolve(config, hardware=hardware, max_sequence_len=50)


def refusal(hardware: Hardware = CPU, **parallel: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        resolved(hardware, **parallel)
    return caught.value


@pytest.mark.parametrize(
    ("asked", "backend", "reduction"),
    [
        ({}, "single", "auto"),
        ({"backend": "process"}, "process", "auto"),
        ({"backend": "emulated"}, "emulated", "auto"),
        ({"tensor_parallel_size": 2}, "process", "native"),
        ({"tensor_parallel_size": 2, "backend": "emulated"}, "emulated", "rank_order"),
        ({"tensor_parallel_size": 2, "reduction": "tree"}, "process", "tree"),
        ({"pipeline_parallel_size": 2}, "process", "auto"),
        ({"pipeline_parallel_size": 2, "backend": "emulated"}, "emulated", "auto"),
        ({"reduction": "ring"}, "single", "ring"),
    ],
)
def test_resolve_decides_backend_and_reduction(
    asked: dict[str, Any], backend: str, reduction: str
) -> None:
    config = resolved(**asked)
    assert (config.parallel.backend, config.parallel.reduction) == (backend, reduction)
    assert resolve(config, hardware=CPU, max_sequence_len=50) == config


@pytest.mark.parametrize(
    ("asked", "threads"),
    [
        ({}, 6),
        ({"tensor_parallel_size": 2}, 3),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 1),
        ({"tensor_parallel_size": 8}, 1),
        ({"tensor_parallel_size": 8, "backend": "emulated"}, 6),
        ({"tensor_parallel_size": 8, "num_threads": 4}, 4),
    ],
)
def test_threads_left_at_0_are_the_cores_shared_by_the_ranks(
    asked: dict[str, Any], threads: int
) -> None:
    assert resolved(**asked).engine.num_threads == threads


def test_only_the_ranks_of_this_machine_share_its_cores() -> None:
    half = Hardware(cuda_available=False, cuda_device_name=None, cpu_count=6, num_local_ranks=2)
    assert resolved(half, tensor_parallel_size=4).engine.num_threads == 3


def test_processes_on_cuda_need_a_device_a_rank() -> None:
    error = refusal(CUDA, tensor_parallel_size=2)
    assert "2 ranks, and this machine has 1" in error.message
    assert error.hint is not None
    assert "emulated" in error.hint


@pytest.mark.parametrize(
    ("devices", "local_ranks", "asked"),
    [
        (2, None, {"tensor_parallel_size": 2}),
        (4, None, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        (1, None, {"tensor_parallel_size": 8, "backend": "emulated"}),
        (2, 2, {"tensor_parallel_size": 4}),
        (1, None, {"tensor_parallel_size": 2, "device": "cpu"}),
    ],
)
def test_ranks_that_this_machine_can_hold_are_accepted(
    devices: int, local_ranks: int | None, asked: dict[str, Any]
) -> None:
    hardware = Hardware(
        cuda_available=True,
        cuda_device_name="some device",
        cpu_count=6,
        num_cuda_devices=devices,
        num_local_ranks=local_ranks,
    )
    resolved(hardware, **asked)


def test_emulated_ranks_have_no_native_reduction() -> None:
    error = refusal(tensor_parallel_size=2, backend="emulated", reduction="native")
    assert 'reduction = "native"' in error.message
    assert error.hint == "use reduction = rank_order, ring or tree"


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 3)])
def test_single_is_one_rank(sizes: tuple[int, int]) -> None:
    error = refusal(
        tensor_parallel_size=sizes[0], pipeline_parallel_size=sizes[1], backend="single"
    )
    assert f"pipeline_parallel_size = {sizes[0] * sizes[1]}" in error.message
    assert error.hint == 'use backend = "process" or "emulated"'


@pytest.mark.parametrize(
    ("parallel", "world", "processes", "grouped"),
    [
        (ParallelConfig(), 1, 1, False),
        (ParallelConfig(backend="process"), 1, 1, True),
        (ParallelConfig(tensor_parallel_size=2), 2, 2, True),
        (ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=3), 6, 6, True),
        (ParallelConfig(tensor_parallel_size=4, backend="emulated"), 4, 1, False),
    ],
)
def test_world_and_processes_follow_from_sizes_and_backend(
    parallel: ParallelConfig, world: int, processes: int, grouped: bool
) -> None:
    assert parallel.world_size == world
    assert parallel.num_processes == processes
    assert parallel.uses_process_group is grouped
