"""Automatic values: what they become, and what a machine cannot honour."""

from __future__ import annotations

import pytest

from trace_audit.config import (
    EngineConfig,
    Hardware,
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
    assert engine.num_threads == 6
    assert engine.max_model_len == 77
    assert engine.shard_size == 32
    assert engine.num_kv_blocks == 0


def test_resolve_keeps_what_was_asked_for() -> None:
    asked = EngineConfig(
        device="cpu",
        attention_backend="eager",
        lm_head_dtype="float32",
        dtype="float16",
        num_threads=2,
        max_model_len=100,
        shard_size=3,
        num_kv_blocks=9,
    )
    config = RunConfig(name="x", engine=asked)
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
    ],
)
def test_resolve_refuses_what_cannot_be_honoured(overrides: dict[str, object], said: str) -> None:
    config = override(default_record_config(), overrides)
    with pytest.raises(ConfigError, match=said):
        resolve(config, hardware=CPU, max_sequence_len=50)


@pytest.mark.parametrize(
    "overrides",
    [
        {"engine.max_num_batched_tokens": 32},
        {"engine.max_model_len": 50},
        {"engine.num_kv_blocks": 4},
    ],
)
def test_resolve_accepts_the_smallest_that_fits(overrides: dict[str, object]) -> None:
    config = override(default_record_config(), overrides)
    resolved = flat(resolve(config, hardware=CPU, max_sequence_len=50))
    assert {key: resolved[key] for key in overrides} == overrides
