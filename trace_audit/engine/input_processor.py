"""Validation and normalization of requests, before anything touches the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from trace_audit.config import MIN_TEMPERATURE
from trace_audit.engine.request import Request, StopChecker
from trace_audit.engine.sampling_params import SamplingParams
from trace_audit.errors import RequestError


class InputProcessor:
    """Turns what a caller asks for into a `Request`, or refuses it.

    Args:
        vocabulary_size: width of the model's logits.
        max_model_len: most tokens of a sequence, prompt and outputs together.
        eos_token_ids: the model's end-of-sequence ids.
        enable_trace_replay: whether requests may carry a trace.
        traces_only: whether they must.
    """

    def __init__(
        self,
        *,
        vocabulary_size: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        enable_trace_replay: bool,
        traces_only: bool = False,
    ) -> None:
        self.vocabulary_size = vocabulary_size
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.enable_trace_replay = enable_trace_replay
        self.traces_only = traces_only

    def process(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        index: int = 0,
        stop_checker: StopChecker | None = None,
        support_token_ids: npt.NDArray[np.int32] | None = None,
    ) -> Request:
        """Validate and normalize one request.

        Raises:
            RequestError: names the parameter, its value and the remedy.
        """
        prompt = self._token_ids("prompt_token_ids", prompt_token_ids)
        self._check_params(params)
        if params.trace_decode_token_ids is not None:
            params = self._normalize_trace(params, prompt_len=len(prompt))
            stop_checker = None
        elif self.traces_only:
            raise RequestError(
                'path = "prefill" scores tokens that are given, and trace_decode_token_ids is not',
                hint='generate with path = "decode"',
            )
        elif len(prompt) + params.max_tokens > self.max_model_len:
            raise RequestError(
                f"a prompt of {len(prompt)} tokens and max_tokens={params.max_tokens} exceed "
                f"max_model_len={self.max_model_len}",
                hint=f"set max_model_len to {len(prompt) + params.max_tokens} or more",
            )
        return Request(
            request_id=request_id,
            index=index,
            prompt_token_ids=prompt,
            params=params,
            eos_token_ids=frozenset() if params.ignore_eos else self.eos_token_ids,
            stop_checker=stop_checker,
            support_token_ids=_check_support(support_token_ids, params),
        )

    def _normalize_trace(self, params: SamplingParams, *, prompt_len: int) -> SamplingParams:
        if not self.enable_trace_replay:
            raise RequestError(
                "trace_decode_token_ids is given but enable_trace_replay is false",
                hint="set engine.enable_trace_replay = true",
            )
        if params.n != 1:
            raise RequestError(
                f"n={params.n} cannot replay a trace",
                hint="a trace is one completion: use n=1",
            )
        if params.prompt_logprobs is not None:
            raise RequestError(
                f"prompt_logprobs={params.prompt_logprobs} cannot be combined with "
                "trace_decode_token_ids",
                hint="leave prompt_logprobs unset",
            )
        assert params.trace_decode_token_ids is not None
        trace = self._token_ids("trace_decode_token_ids", params.trace_decode_token_ids)
        needed = prompt_len + len(trace)
        if needed > self.max_model_len:
            raise RequestError(
                f"trace_decode_token_ids has {len(trace)} tokens, which with a prompt of "
                f"{prompt_len} exceed max_model_len={self.max_model_len}",
                hint=f"set max_model_len to {needed} or more",
            )
        return replace(
            params,
            trace_decode_token_ids=trace,
            max_tokens=len(trace),
            min_tokens=0,
            ignore_eos=True,
            stop_token_ids=(),
            stop=(),
        )

    def _check_params(self, params: SamplingParams) -> None:
        if params.logit_bias:
            raise RequestError(
                "logit_bias edits the logits that are being audited",
                hint="leave logit_bias unset",
            )
        if params.trace_decode_token_ids is None:
            for name, unsupported in (
                ("n", params.n != 1),
                ("prompt_logprobs", params.prompt_logprobs is not None),
            ):
                if unsupported:
                    raise RequestError(f"{name}={getattr(params, name)} is not supported")
        hot = MIN_TEMPERATURE <= params.temperature < float("inf")
        if params.temperature != 0 and not hot:
            raise RequestError(
                f"temperature={params.temperature} is neither 0 nor a number of "
                f"{MIN_TEMPERATURE} or more",
                hint="0 is greedy",
            )
        if params.max_tokens < 1:
            raise RequestError(f"max_tokens={params.max_tokens} is not 1 or more")
        if params.min_tokens < 0:
            raise RequestError(f"min_tokens={params.min_tokens} is negative")

    def _token_ids(self, name: str, values: Sequence[int]) -> list[int]:
        ids = list(values)
        if not ids:
            raise RequestError(f"{name} is empty", hint="give at least one token id")
        for i, value in enumerate(ids):
            # bool is a subclass of int, and True is not token 1.
            if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
                raise RequestError(
                    f"{name}[{i}]={value!r} is not an integer", hint="token ids are integers"
                )
            if not 0 <= value < self.vocabulary_size:
                raise RequestError(
                    f"{name}[{i}]={value} is outside the vocabulary of {self.vocabulary_size}",
                    hint="the ids must come from this model's own tokenizer",
                )
        return [int(v) for v in ids]


def _check_support(
    support: npt.NDArray[np.int32] | None, params: SamplingParams
) -> npt.NDArray[np.int32] | None:
    trace = params.trace_decode_token_ids
    if support is None:
        return None
    if trace is None or support.shape[0] != len(trace):
        raise RequestError(
            f"support_token_ids has {support.shape[0]} rows for a trace of "
            f"{0 if trace is None else len(trace)} tokens",
            hint="the support has one row a trace token",
        )
    return support
