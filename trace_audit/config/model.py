"""The configuration's keys, their defaults and what values they take."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]*")
MAX_NAME_LENGTH = 100  # two of them and more make a file name of at most 255 bytes
RUN_NAME_RULE = (
    f"letters, digits and the characters . _ = + -, starting with a letter or digit, "
    f"at most {MAX_NAME_LENGTH} characters"
)

DType = Literal["float32", "bfloat16", "float16"]
MIN_TEMPERATURE = 1e-6
"""Of a distribution that is sharpened: logits over less could leave float32."""
NonNegative = Annotated[int, Field(ge=0, le=2**31 - 1)]
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class EngineConfig(_Section):
    """How one run computes. `docs/configuration.md` describes every key."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: DType = "float32"
    lm_head_dtype: Literal["auto", DType] = "auto"
    attention_backend: Literal["auto", "eager", "sdpa", "triton"] = "auto"
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 0.9
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    max_num_seqs: Positive = 32
    num_threads: NonNegative = 0
    max_num_batched_tokens: Positive = 2048
    max_model_len: NonNegative = 0
    block_size: Positive = 16
    num_kv_blocks: NonNegative = 0
    preemption: Literal["swap", "recompute"] = "swap"
    shard_size: NonNegative = 0
    path: Literal["decode", "prefill"] = "decode"
    prefill_chunk: NonNegative = 0
    fixed_batch: bool = False
    batch_order_seed: NonNegative = 0
    kv_cache_dtype: Literal["auto", DType, "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8"] = (
        "auto"
    )
    quantization: Literal["none", "int8_weight_only", "int4_weight_only", "fp8"] = "none"
    moe_backend: Literal["auto", "eager", "batched_mm", "grouped_mm"] = "auto"
    compile: bool = False
    fused: bool = False
    enforce_eager: bool = False
    enable_trace_replay: bool = True

    @property
    def num_slots(self) -> int:
        """Sequences in flight: a pass of the prefill path holds one."""
        return 1 if self.path == "prefill" else self.max_num_seqs

    @field_validator("block_size")
    @classmethod
    def _is_power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError("a power of two")
        return value


class ParallelConfig(_Section):
    """How one run is spread over ranks. `docs/configuration.md` describes every key."""

    tensor_parallel_size: Positive = 1
    pipeline_parallel_size: Positive = 1
    backend: Literal["auto", "single", "process", "emulated"] = "auto"
    reduction: Literal["auto", "native", "rank_order", "ring", "tree"] = "auto"
    reduction_dtype: Literal["model", "float32"] = "model"
    timeout_seconds: Positive = 300

    @property
    def world_size(self) -> int:
        """Ranks, real or emulated."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_processes(self) -> int:
        """Processes that compute: one a rank, unless one stands for all."""
        return 1 if self.backend in ("single", "emulated") else self.world_size

    @property
    def uses_process_group(self) -> bool:
        """Whether ranks talk through torch.distributed, be it one rank with itself."""
        return self.backend == "process" or (self.backend == "auto" and self.world_size > 1)


class ScoringConfig(_Section):
    """Which distribution the statistics are of. `docs/configuration.md` describes every key."""

    mode: Literal["raw", "processed"] = "raw"
    temperature: Annotated[float, Field(ge=MIN_TEMPERATURE, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    top_k: NonNegative = 0


class SpeculativeConfig(_Section):
    """Speculative decoding. `docs/configuration.md` describes every key."""

    method: Literal["none", "ngram", "draft_model"] = "none"
    num_speculative_tokens: Positive = 4
    draft_model: str = ""
    prompt_lookup_min: Positive = 1
    prompt_lookup_max: Positive = 4
    rejection: Literal["greedy", "probabilistic"] = "greedy"


SECTIONS: dict[str, type[BaseModel]] = {
    "engine": EngineConfig,
    "scoring": ScoringConfig,
    "speculative": SpeculativeConfig,
    "parallel": ParallelConfig,
}
"""The tables of a configuration file."""


class RunConfig(_Section):
    """One named configuration.

    Attributes:
        name: names the run's directory: letters, digits and `. _ = + -`.
        engine: how the run computes.
        scoring: which distribution the statistics are of.
        speculative: drafts that a launch verifies.
        parallel: how it is spread over ranks.
    """

    name: str
    engine: EngineConfig = EngineConfig()
    scoring: ScoringConfig = ScoringConfig()
    speculative: SpeculativeConfig = SpeculativeConfig()
    parallel: ParallelConfig = ParallelConfig()

    @field_validator("name")
    @classmethod
    def _is_safe_name(cls, value: str) -> str:
        if not is_run_name(value):
            raise ValueError(RUN_NAME_RULE)
        return value


def is_run_name(name: str) -> bool:
    """Whether a run can be called this: safe as a directory name and on a command line."""
    return len(name) <= MAX_NAME_LENGTH and _NAME.fullmatch(name) is not None


def default_record_config() -> RunConfig:
    """The reference that `record` uses unless told otherwise: float32 and eager attention."""
    engine = EngineConfig(dtype="float32", attention_backend="eager")
    return RunConfig(name="record", engine=engine)
