"""run.json of runs over ranks."""

from __future__ import annotations

from typing import Any

ONE_RANK = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "backend": "single",
    "reduction": "auto",
    "reduction_dtype": "model",
    "timeout_seconds": 300,
}
ENGINE = {
    "device": "cpu",
    "dtype": "bfloat16",
    "attention_backend": "sdpa",
    "kv_cache_dtype": "bfloat16",
    "max_num_seqs": 4,
    "num_threads": 1,
    "max_model_len": 90,
    "num_kv_blocks": 0,
    "preemption": "swap",
    "gpu_memory_utilization": 0.9,
}


def info(preemptions: int | None = 0, **changed: Any) -> dict[str, Any]:
    """A run.json; changed are keys of [parallel] or [engine] in its resolved configuration."""
    engine = {key: changed.pop(key, value) for key, value in ENGINE.items()}
    parallel = {key: changed.pop(key, value) for key, value in ONE_RANK.items()}
    config = {"name": "x", "engine": {**engine, **changed}, "parallel": parallel}
    return {
        "model_fingerprint": "m" * 64,
        "environment_fingerprint": "e" * 64,
        "requested_config": config,
        "resolved_config": config,
        "backends": {"attention": "sdpa", "transport": "none"},
        "num_kv_blocks": 24,
        "counters": {} if preemptions is None else {"preemptions": preemptions},
    }
