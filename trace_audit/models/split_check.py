"""Refusing what cannot be split, before any weights are read.

A plan can be wrong for an architecture, and a pipeline's cut too. So a seeded tiny model of its
class, split over two emulated ranks a dimension, must give the logprobs of the whole one.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig

from trace_audit.config import ParallelConfig
from trace_audit.errors import ModelError, TraceAuditError
from trace_audit.models.conformance import (
    TOLERANCE,
    largest_difference,
    paged_logits,
    sample_tokens,
    seeded_model,
    shrunk,
)
from trace_audit.models.split import empty_model, split_model
from trace_audit.models.weights import WholeWeights
from trace_audit.parallel.lockstep import Lockstep
from trace_audit.parallel.pipeline import stage_layers
from trace_audit.parallel.plan import tensor_plan
from trace_audit.parallel.world import lockstep_world

_CPU = torch.device("cpu")


def check_split(config: PreTrainedConfig, parallel: ParallelConfig) -> None:
    """Check that a model can be split as configured, and is then the same model.

    Args:
        config: of the model.
        parallel: resolved.

    Raises:
        ConfigError: it has too few heads, columns or layers; the hint says what works.
        ModelError: it has no plan, or a tiny model of its class differs when split.
    """
    if parallel.world_size == 1:
        return
    text = config.get_text_config()
    stage_layers(int(text.num_hidden_layers), 0, parallel.pipeline_parallel_size)
    if parallel.tensor_parallel_size > 1:
        model = empty_model(config, torch.float32, "eager")
        tensor_plan(model, text, parallel.tensor_parallel_size)
    worst = _difference_of_tiny_model(text, parallel)
    if not worst <= TOLERANCE:
        raise ModelError(
            f"a tiny model of type {text.model_type} differs by {worst:.2g} nats when it is split",
            hint="its plan in transformers does not fit it; use one rank",
        )


def _difference_of_tiny_model(config: PreTrainedConfig, parallel: ParallelConfig) -> float:
    small = ParallelConfig(
        tensor_parallel_size=min(2, parallel.tensor_parallel_size),
        pipeline_parallel_size=min(2, parallel.pipeline_parallel_size),
        backend="emulated",
    )
    tiny = shrunk(config, num_kv_heads=2)
    tokens = sample_tokens(int(tiny.vocab_size))
    whole = seeded_model(tiny, "eager")
    try:
        ours = _split_logits(tiny, whole, tokens, small)
    except TraceAuditError:
        raise
    except Exception as error:  # whatever a shape that does not fit makes torch say
        raise ModelError(
            f"a tiny model of type {config.model_type} cannot be run split: {error}",
            hint="its plan in transformers does not fit it; use one rank",
        ) from error
    with torch.inference_mode():
        theirs = whole(input_ids=tokens[None], use_cache=False).logits[0]
    return largest_difference(ours, theirs)


def _split_logits(
    tiny: PreTrainedConfig, whole: torch.nn.Module, tokens: torch.Tensor, parallel: ParallelConfig
) -> torch.Tensor:
    """Logits [T, V] of a model split over emulated ranks."""
    weights = WholeWeights(dict(whole.named_parameters(remove_duplicate=False)))
    found: list[torch.Tensor | None] = [None] * parallel.world_size
    with Lockstep(parallel.world_size) as lockstep:

        def run(rank: int) -> None:
            loaded = split_model(
                tiny,
                lambda model, names: weights,
                dtype=torch.float32,
                device=_CPU,
                lm_head_dtype=torch.float32,
                world=lockstep_world(parallel, lockstep, rank),
            )
            try:
                with torch.inference_mode():
                    found[rank] = paged_logits(loaded.attention, loaded.forward, tokens)
            finally:
                loaded.attention.close()

        lockstep.start(run)
        run(0)
    logits = found[-1]
    assert logits is not None
    return logits
