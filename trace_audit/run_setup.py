"""What every run needs before its first launch: model, environment, engine."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trace_audit.config import Hardware, RunConfig, flat, resolve
from trace_audit.engine.build import BuiltEngine, build_engine
from trace_audit.environment import environment_fingerprint, environment_info
from trace_audit.errors import ModelError
from trace_audit.models.demo import DEMO_NAME, demo_model
from trace_audit.models.loader import LoadedModel, load_model, torch_dtype
from trace_audit.storage.fingerprint import cache_dir


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Where a model is: its directory, and the hub revision where it came from there."""

    directory: Path
    revision: str | None


def find_model(model: str) -> ModelSource:
    """A local directory, `demo`, or a hub id.

    Raises:
        ModelError: it is none of these, or the hub cannot be reached.
    """
    if model == DEMO_NAME and not Path(model).exists():
        return ModelSource(directory=demo_model(cache_dir()), revision=None)
    path = Path(model)
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") != 1:
        path = path.expanduser()
        if not path.is_dir():
            what = "is not a directory" if path.exists() else "does not exist"
            raise ModelError(
                f"the model directory {path} {what}",
                hint="give a Hugging Face model directory, a hub id (owner/name), or demo",
            )
        return ModelSource(directory=path.resolve(), revision=None)
    return _from_hub(model)


def _from_hub(model: str) -> ModelSource:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        path = Path(
            snapshot_download(
                model, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"{model} is no local directory, and the hub gave none: {reason}",
            hint="download the model and give its directory",
        ) from error
    return ModelSource(directory=path, revision=path.name)


def hardware() -> Hardware:
    """What this process can run on."""
    cuda = torch.cuda.is_available()
    return Hardware(
        cuda_available=cuda,
        cuda_device_name=torch.cuda.get_device_name() if cuda else None,
        cpu_count=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
    )


def resolve_for(config: RunConfig, max_sequence_len: int) -> RunConfig:
    """The configuration with every automatic value decided for this machine and these lengths."""
    return resolve(config, hardware=hardware(), max_sequence_len=max_sequence_len)


def apply_process_settings(config: RunConfig) -> None:
    """Threads, precision and determinism, which belong to the process."""
    torch.set_num_threads(config.engine.num_threads)
    torch.set_float32_matmul_precision(config.engine.matmul_precision)
    torch.manual_seed(0)


def load(config: RunConfig, directory: Path) -> LoadedModel:
    """Load the model of a resolved configuration."""
    return load_model(
        directory,
        dtype=torch_dtype(config.engine.dtype),
        device=torch.device(config.engine.device),
        lm_head_dtype=torch_dtype(config.engine.lm_head_dtype),
    )


def build(config: RunConfig, loaded: LoadedModel) -> BuiltEngine:
    """Build the engine of a resolved configuration."""
    return build_engine(loaded, config.engine)


def run_environment(config: RunConfig) -> dict[str, Any]:
    """The environment a run's numbers come from."""
    gpu: dict[str, Any] = {}
    if config.engine.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        gpu = {
            "gpu_name": properties.name,
            "gpu_capability": f"{properties.major}.{properties.minor}",
            "cuda_version": torch.version.cuda,
            "cublas_workspace_config": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        }
    return {
        **environment_info(),
        **gpu,
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def run_info(
    *,
    requested: RunConfig,
    resolved: RunConfig,
    built: BuiltEngine,
    environment: Mapping[str, Any],
    model: str,
    model_fingerprint: str,
    vocabulary_size: int,
    load_seconds: float,
    engine_seconds: float,
    wall_seconds: float,
    tokens: int,
    resumed_shards: int,
) -> dict[str, Any]:
    """What run.json says of a run that this engine computed."""
    return {
        "model": model,
        "model_fingerprint": model_fingerprint,
        "vocabulary_size": vocabulary_size,
        "requested_config": requested.model_dump(),
        "resolved_config": resolved.model_dump(),
        "environment": dict(environment),
        "environment_fingerprint": environment_fingerprint(environment),
        "backends": built.backends,
        "num_kv_blocks": built.num_kv_blocks,
        "logprobs": "raw",  # of the untouched logits, at temperature 1
        "capabilities": {"statistics": "exact"},
        "resumed_shards": resumed_shards,
        "timing": {
            "load_seconds": load_seconds,
            "engine_seconds": engine_seconds,
            "wall_seconds": wall_seconds,
            "tokens_per_second": tokens / engine_seconds if engine_seconds else None,
        },
    }


def digest(parts: Mapping[str, Any]) -> str:
    """sha256 of what decides a job's bytes; two jobs of one digest can share shards."""
    text = json.dumps(parts, sort_keys=True, default=str, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def numeric_config(config: RunConfig) -> dict[str, Any]:
    """The configuration without its name, which moves no number."""
    return {key: value for key, value in flat(config).items() if key != "name"}
