"""Every refusal and every clearing, and that a refusal disturbs nobody."""

from __future__ import annotations

import numpy as np
import pytest

from trace_audit.engine.input_processor import InputProcessor
from trace_audit.engine.sampling_params import SamplingParams
from trace_audit.errors import RequestError


def processor(**changes) -> InputProcessor:
    values = {
        "vocabulary_size": 100,
        "max_model_len": 20,
        "eos_token_ids": frozenset({2}),
        "enable_trace_replay": True,
    }
    return InputProcessor(**(values | changes))


def traced(trace, prompt=(1, 2, 3), processor=processor, **params):
    return processor().process(
        "r", list(prompt), SamplingParams(trace_decode_token_ids=trace, **params)
    )


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        ([], "empty"),
        ([1, True], r"\[1\]=True is not an integer"),
        ([np.bool_(False)], "not an integer"),
        ([1.0], r"\[0\]=1.0 is not an integer"),
        (["7"], "not an integer"),
        ([3, -1], r"\[1\]=-1 is outside"),
        ([100], "outside the vocabulary of 100"),
        ([2**40], "outside"),
        ([1] * 18, "18 tokens, which with a prompt of 3 exceed max_model_len=20"),
    ],
)
def test_bad_traces_are_refused_by_name_and_value(trace, message):
    """Cases 17 and 18: empty, and ids outside the vocabulary, before anything is gathered."""
    with pytest.raises(RequestError, match="trace_decode_token_ids") as error:
        traced(trace)
    assert error.match(message)
    assert error.value.hint


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"n": 2}, "n=2"),
        ({"prompt_logprobs": 0}, "prompt_logprobs=0"),
        ({"logit_bias": {1: 2.0}}, "logit_bias"),
    ],
)
def test_parameters_that_cannot_go_with_a_trace(params, name):
    with pytest.raises(RequestError, match=name):
        traced([1], **params)


def test_a_trace_is_refused_where_the_feature_is_off_and_the_switch_is_named():
    with pytest.raises(RequestError, match="enable_trace_replay"):
        traced([1], processor=lambda: processor(enable_trace_replay=False))


@pytest.mark.parametrize("prompt", [[], [True], [1.5], [-1], [100]])
def test_prompts_are_checked_the_same_way(prompt):
    with pytest.raises(RequestError, match="prompt_token_ids"):
        processor().process("r", prompt, SamplingParams())


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -0.1},
        {"temperature": 1e-50},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"max_tokens": 0},
        {"min_tokens": -1},
        {"n": 2},
        {"prompt_logprobs": 1},
        {"max_tokens": 18},
    ],
)
def test_bad_parameters_of_a_free_request(params):
    name = next(iter(params))
    with pytest.raises(RequestError, match=name):
        processor().process("r", [1, 2, 3], SamplingParams(**params))


def test_a_trace_as_long_as_the_context_is_taken():
    assert traced([1] * 17).params.max_tokens == 17


def test_numpy_integers_are_integers():
    request = traced(np.array([5, 6], dtype=np.int32))
    assert request.trace == [5, 6]
    assert all(type(t) is int for t in request.trace)


def test_normalization_clears_all_that_could_end_a_trace_early():
    given = SamplingParams(
        trace_decode_token_ids=[2, 7, 9],
        max_tokens=1,
        min_tokens=5,
        stop_token_ids=(7,),
        stop=("x",),
        ignore_eos=False,
    )
    request = processor().process("r", [1], given, stop_checker=lambda ids: True)
    assert request.params.max_tokens == 3
    assert request.params.min_tokens == 0
    assert request.params.ignore_eos
    assert request.params.stop_token_ids == ()
    assert request.params.stop == ()
    assert request.eos_token_ids == frozenset()
    assert request.stop_checker is None
    for token in (2, 7, 9):
        assert request.finish_reason is None
        request.commit(token)
    assert request.finish_reason == "length"
    # The caller's own parameters are untouched.
    assert given.max_tokens == 1
    assert given.stop_token_ids == (7,)


def test_a_trace_longer_than_the_default_max_tokens_is_not_cut():
    """Case 16."""
    request = traced([5] * 17, prompt=[1])
    assert request.params.max_tokens == 17 > SamplingParams().max_tokens


def test_the_support_has_one_row_a_trace_token():
    with pytest.raises(RequestError, match="support_token_ids has 2 rows for a trace of 3"):
        processor().process(
            "r",
            [1],
            SamplingParams(trace_decode_token_ids=[1, 2, 3]),
            support_token_ids=np.zeros((2, 24), dtype=np.int32),
        )


def test_the_next_request_works_after_a_refusal():
    """Case 17: an empty trace is a sentence that names it, and no more."""
    p = processor()
    with pytest.raises(RequestError):
        p.process("r", [1], SamplingParams(trace_decode_token_ids=[]))
    assert p.process("r", [1], SamplingParams(trace_decode_token_ids=[4])).trace == [4]
