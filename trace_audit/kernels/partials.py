"""Small per-chunk tables of a logits row, and the numbers that are made of them."""

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


@dataclass(frozen=True, kw_only=True)
class RowStatistics:
    """Numbers of B rows, each against its token, its top ids and its support.

    Attributes:
        logprob: float32 [B], of the token, in nats.
        rank: int32 [B], 1 + logits strictly larger than the token's; 0 where the normalizer is
            not finite.
        tie_count: int32 [B], other logits equal to the token's; 0 where rank is.
        entropy: float32 [B], in nats.
        logsumexp: float32 [B], the normalizer.
        top_logprobs: float32 [B, T].
        support_logprobs: float32 [B, S]; NaN where the id is -1.
        log_tail_mass: float32 [B], log of the probability outside the fixed support.
        logits_hash: int64 [B], sum of the rows' `bits` modulo 2^64.
    """

    logprob: torch.Tensor
    rank: torch.Tensor
    tie_count: torch.Tensor
    entropy: torch.Tensor
    logsumexp: torch.Tensor
    top_logprobs: torch.Tensor
    support_logprobs: torch.Tensor
    log_tail_mass: torch.Tensor
    logits_hash: torch.Tensor


def num_chunks(vocabulary_size: int) -> int:
    """Chunks that cover the vocabulary; the last may be short."""
    return -(-vocabulary_size // CHUNK)
