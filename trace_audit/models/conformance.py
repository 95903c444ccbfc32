"""Admission of an architecture: our forward against transformers' own on a tiny model of it.

A model can route its attention through the interface and still mean something that the call's
arguments do not say (chunked attention, bidirectional prefixes). So a seeded model of its class,
a few layers with every layer type of the config and a small window, must agree first.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from trace_audit.attention.base import AttentionBatch, KVCache, PagedAttention
from trace_audit.attention.eager import EagerAttention
from trace_audit.errors import ModelError
from trace_audit.models.loader import quiet_transformers

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
    tiny = _shrunk(config.get_text_config())
    attention = PagedAttention()
    try:
        with torch.random.fork_rng(devices=[]), quiet_transformers():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(
                tiny, dtype=torch.float32, attn_implementation=attention.name
            ).eval()
            _spread(model)
        attention.probe(model, tiny.num_hidden_layers)
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
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocabulary_size, (1, _NUM_TOKENS), generator=generator)
    positions = torch.arange(_NUM_TOKENS)[None]
    num_blocks = -(-_NUM_TOKENS // _BLOCK_SIZE)
    cache = KVCache(
        attention.layers,
        num_blocks=num_blocks,
        block_size=_BLOCK_SIZE,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    attention.bind(cache, EagerAttention())
    ours = []
    with torch.inference_mode():
        for start in range(0, _NUM_TOKENS, _CHUNK):
            part = slice(start, min(start + _CHUNK, _NUM_TOKENS))
            attention.prepare(_chunk_batch(part))
            ours.append(_logits(model, tokens[:, part], positions[:, part]))
        model.config._attn_implementation = "eager"  # type: ignore[union-attr]
        theirs = _logits(model, tokens, positions)
    difference = torch.log_softmax(torch.cat(ours), -1) - torch.log_softmax(theirs, -1)
    return float(difference.abs().max())


def _chunk_batch(part: slice) -> AttentionBatch:
    import numpy as np

    table = np.arange(-(-part.stop // _BLOCK_SIZE), dtype=np.int32)[None]
    return AttentionBatch(
        query_lens=np.array([part.stop - part.start]),
        context_lens=np.array([part.stop]),
        block_table=table,
        block_size=_BLOCK_SIZE,
        kv_slots=torch.arange(part.start, part.stop),
        device=torch.device("cpu"),
    )


def _logits(model: torch.nn.Module, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = (
        model(input_ids=tokens, position_ids=positions, use_cache=False).logits[0].float()
    )
    return out


def _spread(model: torch.nn.Module) -> None:
    """Weights large enough that attention matters to the logits."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.0 / parameter.shape[-1] ** 0.5)


def _shrunk(config: PreTrainedConfig) -> Any:
    """The config with small sizes, a small window and every layer type it has."""
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
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    ratio = max(1, config.num_attention_heads // kv_heads)
    heads = 4 if ratio in (1, 2, 4) else ratio
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
