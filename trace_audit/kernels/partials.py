"""Small per-chunk tables of a logits row: what the vocabulary-wide passes leave behind."""

from __future__ import annotations

from dataclasses import dataclass

import torch

CHUNK = 256
"""Token ids a chunk of the vocabulary."""


@dataclass(frozen=True, kw_only=True)
class VocabularyPartials:
    """Per row and chunk, with x the logits and m the chunk's maximum; C chunks.

    Attributes:
        maximum: float32 [B, C]; -inf where every logit is -inf or any is NaN.
        sum_exp: float32 [B, C], sum of exp(x - m).
        sum_exp_x: float32 [B, C], sum of exp(x - m) * (x - m), -inf logits left out.
        bits: int64 [B, C], sum of float32 bits(x) * multiplier(id) modulo 2^64.
    """

    maximum: torch.Tensor
    sum_exp: torch.Tensor
    sum_exp_x: torch.Tensor
    bits: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class TokenCounts:
    """Per row and chunk, relative to one token.

    Attributes:
        num_greater: int32 [B, C], logits strictly larger than the token's.
        num_equal: int32 [B, C], logits equal to the token's, itself included.
    """

    num_greater: torch.Tensor
    num_equal: torch.Tensor


def num_chunks(vocabulary_size: int) -> int:
    """Chunks that cover the vocabulary; the last may be short."""
    return -(-vocabulary_size // CHUNK)
