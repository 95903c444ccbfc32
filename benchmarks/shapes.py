"""Models of random weights in the shapes of real ones, made where they are needed.

Qwen3's architecture. Logits have a standard deviation of 4, about 4 nats of entropy over 152k ids,
so that nothing downstream sees a degenerate distribution.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, int]] = {
    # For tests: a second of a CPU.
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
             "vocab_size": 512},
    "qwen3-0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                   "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
                   "vocab_size": 151936},
    "qwen3-4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
                 "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
                 "vocab_size": 151936},
}  # fmt: skip
LOGIT_STD = 4.0


def random_config(shape: str, *, tied: bool = True) -> Any:
    """The transformers config of a shape; no token ends a sequence.

    Args:
        shape: one of `SHAPES`.
        tied: whether the head is the embedding, as in the models the shapes are taken from.
    """
    from transformers import Qwen3Config

    return Qwen3Config(
        **SHAPES[shape],
        architectures=["Qwen3ForCausalLM"],
        max_position_embeddings=40960,
        tie_word_embeddings=tied,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


def random_model(shape: str, *, dtype: Any, device: Any, tied: bool = True) -> Any:
    """A seeded model with sdpa attention, in memory, on its device.

    Args:
        shape: one of `SHAPES`.
        dtype: torch dtype of all weights.
        device: torch device.
        tied: see `random_config`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            random_config(shape, tied=tied), dtype=dtype, attn_implementation="sdpa"
        )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
        model.get_output_embeddings().weight.mul_(LOGIT_STD)
    return model.eval()


def save_random_model(shape: str, directory: Path, *, device: Any, tied: bool = True) -> Path:
    """A bfloat16 checkpoint of a shape; made once."""
    import torch

    if not (directory / "config.json").exists():
        model = random_model(shape, dtype=torch.bfloat16, device=device, tied=tied)
        model.save_pretrained(directory)
    return directory
