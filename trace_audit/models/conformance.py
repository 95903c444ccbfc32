"""Admission of an architecture: our forward against transformers' own on a tiny model of it.

A model can route its attention through the interface and still mean something that the call's
arguments do not say (chunked attention, bidirectional prefixes). So a seeded model of its class,
a few layers with every layer type of the config and a small window, must agree first.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from trace_audit.attention.base import AttentionBatch
from trace_audit.attention.eager import EagerAttention
from trace_audit.attention.kv_cache import KVCache
from trace_audit.attention.paged import Forward, PagedAttention
from trace_audit.errors import ModelError
from trace_audit.models.loader import causal_forward
from trace_audit.models.pretrained import quiet_transformers
from trace_audit.parallel.plan import kv_heads_of

TOLERANCE = 1e-3
"""Largest accepted difference of float32 logprobs, nats: healthy models stay under 2e-5, a window
that is off by one costs 2."""

_NUM_TOKENS = 24
_CHUNK = 7
_WINDOW = 8
_MAX_LAYERS = 8
_BLOCK_SIZE = 4


def check_architecture(config: PreTrainedConfig) -> float:
    """Largest |difference| of logprobs between the two forwards, nats.

    Raises:
        ModelError: they disagree, or a tiny model of the class cannot be made.
    """
    tiny = shrunk(config.get_text_config())
    attention = PagedAttention()
    try:
        model = seeded_model(tiny, attention.name)
        attention.probe(model, range(tiny.num_hidden_layers), causal_forward(model, has_head=True))
        worst = _compare(model, attention, int(tiny.vocab_size))
    finally:
        attention.close()
    if not worst <= TOLERANCE:
        raise ModelError(
            f"{type(model).__name__} is not computed here as transformers computes it: logprobs "
            f"of a tiny model of its class differ by {worst:.2g} nats",
            hint="its attention means more than the attention interface says",
        )
    return worst


def _compare(model: torch.nn.Module, attention: PagedAttention, vocabulary_size: int) -> float:
    tokens = sample_tokens(vocabulary_size)
    with torch.inference_mode():
        ours = paged_logits(attention, causal_forward(model, has_head=True), tokens)
        assert ours is not None
        model.config._attn_implementation = "eager"  # type: ignore[union-attr]
        theirs = model(input_ids=tokens[None], use_cache=False).logits[0]
    return largest_difference(ours, theirs)


def sample_tokens(vocabulary_size: int) -> torch.Tensor:
    """Seeded ids of a short sequence, int64 [T]."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(vocabulary_size, (_NUM_TOKENS,), generator=generator)


def paged_logits(
    attention: PagedAttention, forward: Forward, tokens: torch.Tensor
) -> torch.Tensor | None:
    """Logits [T, V] of a sequence fed in chunks through the paged cache; None without a head.

    Args:
        attention: of the model, probed.
        forward: of the model.
        tokens: int64 [T].
    """
    cache = KVCache(
        attention.layers,
        num_blocks=-(-len(tokens) // _BLOCK_SIZE),
        block_size=_BLOCK_SIZE,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    attention.bind(cache, EagerAttention())
    chunks = []
    for start in range(0, len(tokens), _CHUNK):
        part = slice(start, min(start + _CHUNK, len(tokens)))
        attention.prepare(_chunk_batch(part))
        positions = torch.arange(part.start, part.stop)
        chunks.append(forward(tokens[part], positions, positions - part.start))
    logits = [chunk for chunk in chunks if chunk is not None]
    return torch.cat(logits) if logits else None


def largest_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Of the log-softmax of two logits [T, V], nats."""
    difference = torch.log_softmax(ours.float(), -1) - torch.log_softmax(theirs.float(), -1)
    return float(difference.abs().max())


def _chunk_batch(part: slice) -> AttentionBatch:
    table = np.arange(-(-part.stop // _BLOCK_SIZE), dtype=np.int32)[None]
    return AttentionBatch(
        query_lens=np.array([part.stop - part.start]),
        context_lens=np.array([part.stop]),
        block_table=table,
        block_size=_BLOCK_SIZE,
        kv_slots=torch.arange(part.start, part.stop),
        device=torch.device("cpu"),
    )


def seeded_model(tiny: PreTrainedConfig, attention: str) -> torch.nn.Module:
    """A float32 model of a config, the same on every call; the global generator is left alone."""
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(0)
        model: torch.nn.Module = AutoModelForCausalLM.from_config(
            tiny, dtype=torch.float32, attn_implementation=attention
        ).eval()
        _spread(model)
    return model


def _spread(model: torch.nn.Module) -> None:
    """Weights large enough that attention matters to the logits."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.0 / parameter.shape[-1] ** 0.5)


def shrunk(config: PreTrainedConfig, num_kv_heads: int = 1) -> Any:
    """The config with small sizes, a small window and every layer type it has.

    Args:
        config: a text config.
        num_kv_heads: at least so many; query heads keep their ratio to them.
    """
    tiny = copy.deepcopy(config)
    layer_types = getattr(config, "layer_types", None)
    num_layers = min(config.num_hidden_layers, _MAX_LAYERS)
    if layer_types:
        kinds = list(dict.fromkeys(layer_types))
        layer_types = (kinds * num_layers)[: max(num_layers, len(kinds))]
        tiny.layer_types = layer_types
        num_layers = len(layer_types)
    tiny.num_hidden_layers = num_layers
    head_dim = 16
    kv_heads = kv_heads_of(config)
    ratio = max(1, config.num_attention_heads // kv_heads)
    heads = 4 if ratio in (1, 2, 4) else ratio
    heads = max(heads, num_kv_heads * ratio)
    sizes = {
        "hidden_size": heads * head_dim,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // ratio),
        "head_dim": head_dim,
        "vocab_size": 128,
        "max_position_embeddings": 4096,
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    for name, value in sizes.items():
        if getattr(config, name, None) is not None:
            setattr(tiny, name, value)
    if getattr(config, "sliding_window", None) is not None:
        tiny.sliding_window = _WINDOW
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(tiny, name, None)
    return tiny
