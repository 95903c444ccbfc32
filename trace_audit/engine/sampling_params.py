"""What a request asks of the sampler, the trace it replays included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request; names as in vLLM.

    Attributes:
        n: completions; only 1 is supported, and named so that a trace can refuse another.
        temperature: 0 is greedy; above 0 tokens are drawn from softmax(logits / temperature).
        seed: seed of the draws; a draw depends on (seed, request index, step) alone.
        max_tokens: most tokens to generate.
        min_tokens: EOS and stop ids are ignored before this many tokens.
        ignore_eos: whether the model's end-of-sequence tokens end the request.
        stop_token_ids: ids that end the request; the id is part of the output.
        stop: stop strings; matched by the request's `stop_checker`, since the engine has no text.
        prompt_logprobs: unsupported, and named so that a trace can refuse it.
        logit_bias: unsupported, and named so that a trace can refuse it.
        trace_decode_token_ids: tokens to replay instead of the sampled ones.
    """

    n: int = 1
    temperature: float = 0.0
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    trace_decode_token_ids: Sequence[int] | None = None
