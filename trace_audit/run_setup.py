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
from trace_audit.environment import environment_info
from trace_audit.errors import ModelError
from trace_audit.jobs import Rendezvous
from trace_audit.models.compiled import check_compiler
from trace_audit.models.conformance import check_architecture
from trace_audit.models.demo import DEMO_NAME, demo_model
from trace_audit.models.experts import apply_moe_backend
from trace_audit.models.fused import check_fusable
from trace_audit.models.pretrained import check_context, read_config
from trace_audit.models.quantization_check import check_quantization
from trace_audit.models.split_check import check_split
from trace_audit.storage.fingerprint import cache_dir, model_fingerprint

_NOT_NUMERIC = frozenset({"name", "parallel.timeout_seconds"})


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Where a model is: its directory, and the hub revision where it came from there."""

    directory: Path
    revision: str | None


_WHAT_A_MODEL_IS = "give a Hugging Face model directory, a hub id (owner/name), or demo"


def find_model(model: str) -> ModelSource:
    """A local directory, `demo`, or a hub id.

    Raises:
        ModelError: it is none of these, or the hub cannot be reached.
    """
    if not model:
        raise ModelError("the model is empty", hint=_WHAT_A_MODEL_IS)
    if model == DEMO_NAME and not Path(model).exists():
        return ModelSource(directory=demo_model(cache_dir()), revision=None)
    path = Path(model)
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") != 1:
        path = path.expanduser()
        if not path.is_dir():
            what = "is not a directory" if path.exists() else "does not exist"
            raise ModelError(
                f"the model directory {path} {what}",
                hint=_WHAT_A_MODEL_IS,
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


@dataclass(frozen=True, kw_only=True)
class DraftSource:
    """Where the draft model is, and the fingerprint of its files."""

    directory: Path
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A run that is ready to load its model.

    Attributes:
        config: resolved for this machine and the longest sequence.
        conformance: largest difference of logprobs from transformers' own forward on a tiny model
            of the architecture, nats.
        environment: what the numbers depend on besides the configuration.
        draft: the model that drafts; None without one.
    """

    config: RunConfig
    conformance: float
    environment: dict[str, Any]
    draft: DraftSource | None

    @property
    def digest_parts(self) -> dict[str, Any]:
        """What it adds to the digest of a job."""
        return {
            "config": numeric_config(self.config),
            "environment": self.environment,
            "draft_model": None if self.draft is None else self.draft.fingerprint,
        }


def prepare(
    requested: RunConfig, source: ModelSource, longest: int, rendezvous: Rendezvous | None
) -> Setup:
    """Decide and check everything that does not need the weights; sets what belongs to the process.

    Args:
        requested: the configuration as the user gave it.
        source: where the model is.
        longest: tokens of the longest sequence, prompt and outputs.
        rendezvous: how the ranks met; None without any.

    Raises:
        ModelError, ConfigError: the model or the machine cannot honour the configuration.
    """
    model_config = read_config(source.directory)
    config = resolve(requested, hardware=hardware(rendezvous), max_sequence_len=longest)
    check_context(model_config, config.engine.max_model_len)
    apply_moe_backend(model_config, config.engine.moe_backend)
    conformance = check_architecture(model_config)
    check_split(model_config, config.parallel)
    check_quantization(model_config, config.engine.quantization)
    if config.engine.fused:
        check_fusable(model_config.get_text_config())
    if config.engine.compile:
        check_compiler(config.engine.device)
    draft = _find_draft(config)
    use_device(config, rendezvous)
    apply_process_settings(config)
    return Setup(
        config=config,
        conformance=conformance,
        environment=run_environment(config),
        draft=draft,
    )


def _find_draft(config: RunConfig) -> DraftSource | None:
    """The draft model. Its architecture needs no conformance: a bad draft is only rejected."""
    if config.speculative.method != "draft_model":
        return None
    directory = find_model(config.speculative.draft_model).directory
    check_context(read_config(directory), config.engine.max_model_len)
    return DraftSource(directory=directory, fingerprint=model_fingerprint(directory))


def hardware(rendezvous: Rendezvous | None) -> Hardware:
    """What this process can run on, and how many ranks of the run share its machine."""
    cuda = torch.cuda.is_available()
    return Hardware(
        cuda_available=cuda,
        cuda_device_name=torch.cuda.get_device_name() if cuda else None,
        cpu_count=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        num_cuda_devices=torch.cuda.device_count() if cuda else 0,
        num_local_ranks=None if rendezvous is None else rendezvous.local_world_size,
    )


def apply_process_settings(config: RunConfig) -> None:
    """Threads, precision and determinism, which belong to the process."""
    torch.set_num_threads(config.engine.num_threads)
    torch.set_float32_matmul_precision(config.engine.matmul_precision)
    torch.manual_seed(0)


def use_device(config: RunConfig, rendezvous: Rendezvous | None) -> None:
    """Where every rank has a GPU of its own, make it this process's current one."""
    if config.engine.device == "cuda" and rendezvous is not None:
        torch.cuda.set_device(rendezvous.local_rank)


def run_environment(config: RunConfig) -> dict[str, Any]:
    """The environment a run's numbers come from."""
    gpu: dict[str, Any] = {}
    if config.engine.device == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        gpu = {
            "gpu_name": properties.name,
            "gpu_capability": f"{properties.major}.{properties.minor}",
            "cuda_version": torch.version.cuda,
            "cublas_workspace_config": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
            # Of every run, or one without ranks could not be compared with one of several.
            "nccl_version": ".".join(map(str, torch.cuda.nccl.version())),
        }
    environment = environment_info()
    # torch says more than its package's metadata may, which can lack the build (+cu130).
    environment["versions"] |= {"torch": str(torch.__version__)}
    return {
        **environment,
        **gpu,
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def digest(parts: Mapping[str, Any]) -> str:
    """sha256 of what decides a job's bytes; two jobs of one digest can share shards."""
    text = json.dumps(parts, sort_keys=True, default=str, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def numeric_config(config: RunConfig) -> dict[str, Any]:
    """The configuration without what moves no number."""
    return {key: value for key, value in flat(config).items() if key not in _NOT_NUMERIC}
