"""Tiny random models, and engines over them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    StableLmConfig,
)

from trace_audit.config import EngineConfig
from trace_audit.engine.build import BuiltEngine, build_engine
from trace_audit.engine.request import Request, RequestOutput
from trace_audit.engine.sampling_params import SamplingParams
from trace_audit.models.loaded import LoadedModel
from trace_audit.models.loader import load_model
from trace_audit.storage.schema import SUPPORT_TOP_K

VOCABULARY = 512
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 2,
}


def tiny_config(family: str) -> PreTrainedConfig:
    """The config of a family's tiny model: its name is what the branches below compare with."""
    if family == "llama-8kv":
        heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 192}
        return LlamaConfig(**(COMMON | heads))
    if family == "llama-2l":  # where who gets which tokens is tested rather than what comes out
        return LlamaConfig(**(COMMON | {"num_hidden_layers": 2}))
    if family == "llama-9h":  # as the demo model has them
        heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144}
        return LlamaConfig(**(COMMON | heads))
    if family == "granite":
        scales = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}
        return GraniteConfig(**COMMON, **scales)
    if family in ("qwen3-moe", "mixtral"):
        return _moe_config(family)
    if family in _PLAIN:
        return _PLAIN[family](**COMMON)
    if family in ("llama", "llama-tied"):
        return LlamaConfig(**COMMON, tie_word_embeddings=family == "llama-tied")
    sliding = {"sliding_window": 24, "query_pre_attn_scalar": 16}
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    if family == "gemma3":
        return Gemma3TextConfig(**COMMON, **sliding, layer_types=kinds)
    assert family == "gemma2"
    return Gemma2Config(**COMMON, **sliding, layer_types=kinds)


_PLAIN = {
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "phi3": Phi3Config,
    "olmo2": Olmo2Config,
    "stablelm": StableLmConfig,
}


def _moe_config(family: str) -> PreTrainedConfig:
    if family == "mixtral":
        return MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2)
    return Qwen3MoeConfig(
        **COMMON,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=[1],
    )


def save_tiny(directory: Path, family: str = "llama", seed: int = 0, scale: float = 1.5) -> Path:
    """A seeded checkpoint whose distributions are neither flat nor one-hot."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=scale / parameter.shape[-1] ** 0.5)
            elif family == "qwen2":  # the one with biases of query, key and value
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    return directory


def engine_config(**changes: Any) -> EngineConfig:
    """A resolved configuration for tiny models."""
    values: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "lm_head_dtype": "float32",
        "attention_backend": "eager",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 128,
        "block_size": 8,
        "num_threads": 1,
        "shard_size": 32,
    }
    return EngineConfig(**(values | changes))


@dataclass(kw_only=True)
class Harness:
    """A loaded tiny model with an engine over it."""

    loaded: LoadedModel
    built: BuiltEngine
    launches: list[tuple[int, ...]] = field(default_factory=list)

    @classmethod
    def make(
        cls,
        directory: Path,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        head_dtype: torch.dtype | None = None,
        **changes: Any,
    ) -> Harness:
        loaded = load_model(
            directory, dtype=dtype, device=device, lm_head_dtype=head_dtype or dtype
        )
        config = engine_config(device=device.type, **changes)
        return cls.around(loaded, build_engine(loaded, config))

    @classmethod
    def around(cls, loaded: LoadedModel, built: BuiltEngine) -> Harness:
        """A harness that notes the launches of an engine."""
        harness = cls(loaded=loaded, built=built)
        runner = harness.built.engine._runner
        execute = runner.execute

        def logged(scheduled: Any) -> Any:
            harness.launches.append(tuple(s.num_tokens for s in scheduled))
            return execute(scheduled)

        runner.execute = logged  # type: ignore[method-assign]
        return harness

    def request(self, index: int, prompt: list[int], support: Any = None, **params: Any) -> Request:
        return self.built.input_processor.process(
            f"r{index}", prompt, SamplingParams(**params), index=index, support_token_ids=support
        )

    def run(self, requests: list[Request]) -> list[RequestOutput]:
        return self.built.engine.run(requests)

    def record(self, prompts: list[list[int]], max_tokens: int = 12, **params: Any):
        params = {"ignore_eos": True, "max_tokens": max_tokens} | params
        return self.run([self.request(i, p, **params) for i, p in enumerate(prompts)])

    def replay(self, prompts: list[list[int]], outputs: list[RequestOutput], **params: Any):
        return self.run(
            [
                self.request(
                    i,
                    p,
                    o.support_token_ids,
                    trace_decode_token_ids=o.token_ids.tolist(),
                    **params,
                )
                for i, (p, o) in enumerate(zip(prompts, outputs, strict=True))
            ]
        )


def random_prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Random token ids, one prompt a length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def differing_columns(a: list[RequestOutput], b: list[RequestOutput]) -> set[str]:
    """Names of the columns in which two runs differ in any bit."""
    names = set()
    for left, right in zip(a, b, strict=True):
        for name, value in vars(left).items():
            other = getattr(right, name)
            same = (
                value == other
                if isinstance(value, str)
                else (value.shape == other.shape and value.tobytes() == other.tobytes())
            )
            if not same:
                names.add(name)
    return names


def check_supports_agree(a: RequestOutput, b: RequestOutput, tolerance: float) -> None:
    """Of logits that differ by rounding: a near tie may change places, a draw may not jump.

    The likeliest ids are compared by their logprobs, which are sorted. Where both rows exclude the
    same ids from the draws, a draw is the same id, or the next one that can be drawn: it fell on
    the boundary between two.
    """
    gaps = np.abs(a.support_logprobs - b.support_logprobs)[:, :SUPPORT_TOP_K]
    assert gaps.max() < tolerance
    compared = 0
    for ours, theirs in zip(a.support_token_ids, b.support_token_ids, strict=True):
        excluded = set(ours[:SUPPORT_TOP_K].tolist())
        if excluded != set(theirs[:SUPPORT_TOP_K].tolist()):
            continue
        compared += 1
        drawn = zip(ours[SUPPORT_TOP_K:].tolist(), theirs[SUPPORT_TOP_K:].tolist(), strict=True)
        for low, high in map(sorted, drawn):
            assert set(range(low + 1, high)) <= excluded
    assert compared > len(a.support_token_ids) // 2


def save_tokenizer(directory: Path) -> Path:
    """A byte-level tokenizer: ids 0 to 2 are special, 3 + b is byte b, the rest is padding."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    special = ["<pad>", "<s>", "</s>"]
    characters = bytes_to_unicode()
    vocabulary = {token: i for i, token in enumerate(special)}
    vocabulary |= {characters[byte]: 3 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(directory)
    return directory
