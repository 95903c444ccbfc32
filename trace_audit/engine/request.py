"""A request as the scheduler sees it, and what the engine returns for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from trace_audit.engine.sampling_params import SamplingParams

Phase: TypeAlias = Literal["prefill", "decode", "verify"]
PHASES: tuple[Phase, ...] = ("prefill", "decode", "verify")
StopChecker = Callable[[Sequence[int]], bool]
"""Given the output ids so far, whether a stop string has appeared."""


@dataclass(kw_only=True, eq=False)
class Request:
    """One sequence in flight.

    Attributes:
        request_id: unique name.
        index: position in the audit; seeds the request's draws.
        prompt_token_ids: the prompt.
        params: normalized parameters (see `InputProcessor`).
        eos_token_ids: ids that end the request; empty when ignored.
        stop_checker: called after each sampled token; None for none.
        support_token_ids: int32 [len(trace), num_support], ids whose logprobs are wanted at each
            step (-1 for none); None: the step's own top ids and tail draws are taken.
        full_logprobs: float64 [max_tokens], the priority of each step's logprobs over the whole
            vocabulary: of all requests that run together those of smallest priority are returned,
            of infinite priority none; None: none of this request.
        output_token_ids: committed tokens.
        slot: row of the request state while running, else -1.
        block_ids: KV blocks in position order.
        num_computed_tokens: tokens whose KV is in the cache.
        finish_reason: "stop" or "length" once finished.
    """

    request_id: str
    index: int
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    stop_checker: StopChecker | None = None
    support_token_ids: npt.NDArray[np.int32] | None = None
    full_logprobs: npt.NDArray[np.float64] | None = None
    output_token_ids: list[int] = field(default_factory=list)
    slot: int = -1
    block_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    finish_reason: str | None = None

    @property
    def trace(self) -> Sequence[int] | None:
        """The tokens to replay, or None for a free request."""
        return self.params.trace_decode_token_ids

    @property
    def prompt_len(self) -> int:
        """Prompt tokens."""
        return len(self.prompt_token_ids)

    @property
    def total_len(self) -> int:
        """Prompt and committed output tokens."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that must go through the model before the next one can be sampled."""
        return self.total_len - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether its next token needs one more row and nothing of the prompt."""
        return self.num_uncomputed_tokens == 1 and self.num_computed_tokens >= self.prompt_len

    def commit(self, token_id: int) -> None:
        """Append a token and decide whether the request is finished."""
        self.output_token_ids.append(token_id)
        num_outputs = len(self.output_token_ids)
        if num_outputs >= self.params.min_tokens and self._stopped(token_id):
            self.finish_reason = "stop"
        elif num_outputs >= self.params.max_tokens:
            self.finish_reason = "length"

    def _stopped(self, token_id: int) -> bool:
        if token_id in self.eos_token_ids or token_id in self.params.stop_token_ids:
            return True
        return self.stop_checker is not None and self.stop_checker(self.output_token_ids)


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A finished request's tokens and their statistics; T is the number of output tokens.

    Attributes:
        request_id: the request's name.
        finish_reason: "stop" or "length".
        token_ids: int32 [T].
        position: int32 [T], absolute position of each output token.
        launch_tokens, launch_requests, chunk_start: int32 [T], the launch each token came from:
            its tokens and its requests, both with padding, and the first position of this
            request's chunk in it.
        phase: int8 [T], index into `PHASES`: what the launch computed of this request.
        logprob: float32 [T], natural-log probability of the token in the untouched logits.
        rank: int32 [T], 1 + strictly larger logits; 0 where the row has no finite normalizer.
        tie_count: int32 [T], others equal to it.
        entropy, logsumexp: float32 [T], nats.
        top_token_ids: int32 [T, num_top], best first, of equal logits the lowest id first.
        top_logprobs: float32 [T, num_top].
        support_token_ids: int32 [T, num_support], -1 where there is none.
        support_logprobs: float32 [T, num_support]; NaN where the id is -1.
        log_tail_mass: float32 [T], log of the probability outside the support's top ids.
        logits_hash: int64 [T].
        expert_ids: uint16 [T, L, k], what the router of each of the model's L layers with one chose
            in the row that gives the token's logits, ascending; L = 0 for a model without routers,
            or where their choices are not recorded.
        full_logprob_steps: int32 [n], ascending, the steps whose whole distribution was kept.
        full_logprobs: float32 [n, V], natural-log probability of every id at those steps.
    """

    request_id: str
    finish_reason: str
    token_ids: npt.NDArray[np.int32]
    position: npt.NDArray[np.int32]
    launch_tokens: npt.NDArray[np.int32]
    launch_requests: npt.NDArray[np.int32]
    chunk_start: npt.NDArray[np.int32]
    phase: npt.NDArray[np.int8]
    logprob: npt.NDArray[np.float32]
    rank: npt.NDArray[np.int32]
    tie_count: npt.NDArray[np.int32]
    entropy: npt.NDArray[np.float32]
    logsumexp: npt.NDArray[np.float32]
    top_token_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]
    support_token_ids: npt.NDArray[np.int32]
    support_logprobs: npt.NDArray[np.float32]
    log_tail_mass: npt.NDArray[np.float32]
    logits_hash: npt.NDArray[np.int64]
    expert_ids: npt.NDArray[np.uint16]
    full_logprob_steps: npt.NDArray[np.int32]
    full_logprobs: npt.NDArray[np.float32]
