"""From a resolved configuration and a loaded model to an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from trace_audit.attention.base import AttentionBackend
from trace_audit.attention.eager import EagerAttention
from trace_audit.attention.kv_cache import KVCache
from trace_audit.attention.sdpa import SdpaAttention
from trace_audit.attention.triton import TritonAttention
from trace_audit.config import Distribution, EngineConfig, SpeculativeConfig
from trace_audit.config.kv_formats import KV_FORMATS
from trace_audit.engine.block_pool import BlockPool
from trace_audit.engine.decode_mode import decode_mode
from trace_audit.engine.draft_model import DraftModel
from trace_audit.engine.engine import Engine
from trace_audit.engine.fixed_batch import check_experts, check_rows, num_decode_rows
from trace_audit.engine.input_processor import InputProcessor
from trace_audit.engine.kv_memory import KV_DTYPES, block_bytes, num_blocks, stored_dtype
from trace_audit.engine.model_runner import ModelRunner
from trace_audit.engine.padding import decode_padding
from trace_audit.engine.prefill_path import PrefillRunner, PrefillScheduler
from trace_audit.engine.proposers import Drafting, NgramProposer, PlaceholderProposer
from trace_audit.engine.scheduler import Scheduler, SchedulerHooks
from trace_audit.engine.trace_replay import TraceKernels
from trace_audit.errors import ConfigError
from trace_audit.kernels import kv_cache, reference, trace_replay
from trace_audit.kernels.paged_decode import split_length
from trace_audit.kernels.runtime import can_run_triton, kernel_mode
from trace_audit.kernels.statistics import REFERENCE, statistics_kernels
from trace_audit.models.compiled import COMPILED
from trace_audit.models.fused import fused_layers
from trace_audit.models.loaded import LoadedModel
from trace_audit.parallel.world import World, single_world

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
    scored: Distribution | None = None,
    speculative: SpeculativeConfig | None = None,
    draft: LoadedModel | None = None,
    make_runner: MakeRunner = ModelRunner,
) -> BuiltEngine:
    """Build an engine; where there are ranks, every one of them at the same time.

    Args:
        loaded: the model, or this rank's share of it.
        config: resolved: no "auto", no 0 but `num_kv_blocks`.
        world: this rank's place; None: there are no ranks.
        scored: what statistics are of; None: the logits as they are.
        speculative: resolved; None: no drafts.
        draft: the whole draft model, on the rank that samples, if there is one.
        make_runner: what runs the launches.

    Raises:
        ConfigError: the model or the machine cannot honour the configuration.
    """
    world = world or single_world()
    speculative = speculative or SpeculativeConfig()
    device = next(loaded.model.parameters()).device
    kv_cache_dtype = stored_dtype(loaded, config)
    # One schedule for all: the rank with the least room decides.
    fitting = num_blocks(config, block_bytes(loaded, draft, config, kv_cache_dtype), device, world)
    num_kv_blocks = min(world.all.gather_objects(fitting))
    backend = _backend(config, loaded)
    # Interpreted kernels cost time, the vocabulary-wide ones far too much: only on request.
    interpreted = device.type == "cpu" and config.attention_backend != "triton"
    use_reference = interpreted or not can_run_triton(device)
    shared = {
        "loaded": loaded,
        "world": world,
        "backend": backend,
        "statistics_kernels": REFERENCE if use_reference else statistics_kernels(),
        "max_num_reqs": config.num_slots,
        "max_model_len": config.max_model_len,
        # One more block than there is to give away: the null block of padding.
        "kv_cache": _kv_cache(loaded, config, kv_cache_dtype, num_kv_blocks + 1, use_reference),
        "block_size": config.block_size,
        "scored": scored or Distribution(),
    }
    if config.path == "prefill":
        runner: ModelRunner = PrefillRunner(**shared)
    else:
        runner = make_runner(
            **shared,
            trace_kernels=_trace_kernels(config, use_reference),
            padding=decode_padding(config, device),
            decode=decode_mode(loaded, config, speculative, world, backend),
            draft_model=_draft_model(draft, loaded, config, num_kv_blocks),
            rejection=speculative.rejection,
        )
    if config.fixed_batch:
        _check_fixed_batch(loaded, config)
    pool = BlockPool(num_kv_blocks, config.block_size)
    scheduler = _scheduler(config, runner, pool, _drafting(speculative))
    return BuiltEngine(
        engine=Engine(runner=runner, world=world, scheduler=scheduler),
        input_processor=InputProcessor(
            vocabulary_size=loaded.vocabulary_size,
            max_model_len=config.max_model_len,
            eos_token_ids=loaded.eos_token_ids,
            enable_trace_replay=config.enable_trace_replay,
            traces_only=config.path == "prefill",
        ),
        num_kv_blocks=num_kv_blocks,
        backends={
            **_model_backends(loaded),
            "device": str(device),
            "attention": backend.name,
            "decode": runner.decode,
            "kv_cache": kv_cache_dtype,
            "transport": world.transport,
            "trace_replay": _overwrites(config, device, use_reference),
            "token_statistics": "reference" if use_reference else kernel_mode(device),
        },
    )


def _model_backends(loaded: LoadedModel) -> dict[str, str]:
    """What the model's own parts run as, for run.json."""
    device = next(loaded.model.parameters()).device
    return {
        "linear": loaded.linear,
        "experts": loaded.experts,
        "weights": loaded.weights,
        "quantization": loaded.quantized.name,
        "weight_scales": loaded.quantized.scales,
        "checkpoint": loaded.checkpoint or "plain",
        "compile": COMPILED if loaded.compiled else "none",
        "layers": fused_layers(device) if loaded.fused else "transformers",
    }


def _kv_cache(
    loaded: LoadedModel,
    config: EngineConfig,
    kv_cache_dtype: str,
    num_kv_blocks: int,
    use_reference: bool,
) -> KVCache:
    return KVCache(
        loaded.layers,
        num_blocks=num_kv_blocks,
        block_size=config.block_size,
        dtype=KV_DTYPES[kv_cache_dtype],
        device=next(loaded.model.parameters()).device,
        scaled=KV_FORMATS[kv_cache_dtype].scale_bytes > 0,
        kernels=reference if use_reference else kv_cache,
    )


def _check_fixed_batch(loaded: LoadedModel, config: EngineConfig) -> None:
    """Refuse a model or a machine on which a row depends on the others; the cache is bound."""
    check_experts(loaded)
    rows = num_decode_rows(config.max_num_seqs)
    check_rows(loaded, num_rows=rows, block_size=config.block_size)


def _scheduler(
    config: EngineConfig,
    hooks: SchedulerHooks,
    pool: BlockPool,
    drafting: Drafting | None,
) -> Scheduler | PrefillScheduler:
    if config.path == "prefill":
        return PrefillScheduler(pool=pool, chunk_size=config.prefill_chunk, hooks=hooks)
    return Scheduler(
        pool=pool,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        swap=config.preemption == "swap",
        hooks=hooks,
        fixed_batch=config.fixed_batch,
        drafting=drafting,
    )


def _trace_kernels(config: EngineConfig, use_reference: bool) -> TraceKernels | None:
    if not config.enable_trace_replay:
        return None
    # Interpreted, the kernels are as exact and cost a CPU 3 % of a decode step.
    return reference if use_reference else trace_replay


def _drafting(config: SpeculativeConfig) -> Drafting | None:
    if config.method == "none":
        return None
    ngram = NgramProposer(
        prompt_lookup_min=config.prompt_lookup_min, prompt_lookup_max=config.prompt_lookup_max
    )
    return Drafting(
        proposer=ngram if config.method == "ngram" else PlaceholderProposer(),
        num_speculative_tokens=config.num_speculative_tokens,
    )


def _draft_model(
    draft: LoadedModel | None, loaded: LoadedModel, config: EngineConfig, num_kv_blocks: int
) -> DraftModel | None:
    if draft is None:
        return None
    if draft.vocabulary_size != loaded.vocabulary_size:
        raise ConfigError(
            f"the draft model has a vocabulary of {draft.vocabulary_size} ids and the model one of "
            f"{loaded.vocabulary_size}",
            hint="a draft model must have the model's own tokenizer",
        )
    return DraftModel(
        loaded=draft,
        backend=_backend(config, draft),
        num_blocks=num_kv_blocks,
        block_size=config.block_size,
    )


def _overwrites(config: EngineConfig, device: torch.device, use_reference: bool) -> str:
    """What the overwrite runs as, for run.json."""
    if config.path == "prefill":
        return "none"  # the trace's tokens are inputs of the pass
    return "reference" if use_reference else kernel_mode(device)


def _backend(config: EngineConfig, loaded: LoadedModel) -> AttentionBackend:
    device = next(loaded.model.parameters()).device
    name = config.attention_backend
    if name == "eager":
        return EagerAttention()
    if name == "sdpa":
        return SdpaAttention(row_by_row=config.fixed_batch)
    if name == "triton":
        if not can_run_triton(device):
            raise ConfigError(
                f"attention_backend triton cannot run on {device.type} in this process",
                hint='triton needs Linux; use attention_backend = "sdpa" or "eager"',
            )
        return TritonAttention(split=split_length(config.max_num_seqs, loaded.num_kv_heads))
    raise ConfigError(f"attention_backend {name!r} is not one of eager, sdpa, triton")
