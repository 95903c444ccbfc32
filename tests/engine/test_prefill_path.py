"""`path = "prefill"`: the trace in one pass, with the logprobs of decode and of transformers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.engine.test_accuracy import transformers_logprobs
from tests.parallel.emulated import emulated, emulated_harness
from tests.tiny import (
    VOCABULARY,
    Harness,
    check_supports_agree,
    differing_columns,
    random_prompts,
)
from trace_audit.engine.prefill_path import HEAD_ROWS
from trace_audit.engine.request import PHASES
from trace_audit.errors import RequestError

FAMILIES = [
    "llama", "llama-tied", "qwen3", "gemma3", "gemma2", "granite", "qwen3-moe", "mixtral", "phi3",
    "olmo2", "stablelm",
]  # fmt: skip
TOLERANCE = 5e-5  # nats, float32
# On both sides of the block size, above the sliding window, and a prompt of one token.
LENGTHS = [1, 8, 9, 31, 70, 17]


def passes(directory, device, *args, **changes) -> Harness:
    return Harness.make(directory, device, *args, path="prefill", **changes)


def worst_delta(a, b) -> float:
    return max(np.abs(x.logprob - y.logprob).max() for x, y in zip(a, b, strict=True))


def random_traces(count: int, length: int) -> list[list[int]]:
    return random_prompts([length] * count, seed=1)


def score(harness: Harness, prompts, traces):
    return harness.run(
        [
            harness.request(i, p, trace_decode_token_ids=t)
            for i, (p, t) in enumerate(zip(prompts, traces, strict=True))
        ]
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_gives_the_logprobs_of_decode_and_of_transformers(checkpoint, device, family):
    prompts = random_prompts(LENGTHS)
    decoded = Harness.make(checkpoint(family), device).record(prompts, 20)
    harness = passes(checkpoint(family), device)
    scored = harness.replay(prompts, decoded)
    assert worst_delta(decoded, scored) < TOLERANCE
    for a, b in zip(decoded, scored, strict=True):
        assert np.abs(a.entropy - b.entropy).max() < TOLERANCE
        assert (a.token_ids == b.token_ids).all()
        assert (a.support_token_ids == b.support_token_ids).all()
        assert np.abs(a.support_logprobs - b.support_logprobs).max() < 2 * TOLERANCE
    for prompt, output in zip(prompts, scored, strict=True):
        theirs = transformers_logprobs(
            harness.loaded.model, prompt, output.token_ids.tolist(), device
        )
        assert np.abs(output.logprob - theirs).max() < TOLERANCE


@pytest.mark.parametrize("backend", ["eager", "sdpa", "triton"])
@pytest.mark.parametrize("length", [255, 256, 257])
def test_launches_around_256_tokens_are_right_on_every_backend(checkpoint, device, backend, length):
    # Some kernels change their block size there.
    prompt, trace = random_prompts([length + 1 - 40])[0], random_traces(1, 40)[0]
    harness = passes(checkpoint(), device, attention_backend=backend, max_model_len=300)
    output = score(harness, [prompt], [trace])[0]
    assert harness.launches == [(length,)]
    theirs = transformers_logprobs(harness.loaded.model, prompt, trace, device)
    assert np.abs(output.logprob - theirs).max() < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_pass_twice_is_the_same_bits(checkpoint, device, dtype):
    prompts, traces = random_prompts(LENGTHS), random_traces(len(LENGTHS), 30)
    runs = [score(passes(checkpoint(), device, dtype), prompts, traces) for _ in range(2)]
    assert differing_columns(*runs) == set()


def test_a_sequence_does_not_depend_on_its_neighbours_or_on_the_decode_settings(checkpoint, device):
    prompts, traces = random_prompts(LENGTHS), random_traces(len(LENGTHS), 30)
    together = score(passes(checkpoint(), device, torch.bfloat16), prompts, traces)
    changes = {"max_num_seqs": 1, "max_num_batched_tokens": 4, "num_kv_blocks": 13}
    harness = passes(checkpoint(), device, torch.bfloat16, **changes)
    apart = [score(harness, [p], [t])[0] for p, t in zip(prompts, traces, strict=True)]
    # The draws of a tail are seeded by the sequence's place in the audit, which is 0 for each here.
    assert differing_columns(together[:1], apart[:1]) == set()
    own = {"request_id", "support_token_ids", "support_logprobs"}
    assert differing_columns(together, apart) <= own


def test_a_launch_is_a_sequence_and_its_rows_say_so(checkpoint, device):
    prompts, traces = random_prompts([5, 1]), [[7] * 4, [9]]
    harness = passes(checkpoint(), device)
    outputs = score(harness, prompts, traces)
    assert harness.launches == [(8,), (1,)]
    assert harness.built.engine.counters.steps == 2
    first, second = outputs
    assert first.launch_tokens.tolist() == [8] * 4
    assert first.position.tolist() == [5, 6, 7, 8]
    assert second.launch_tokens.tolist() == [1]
    for output in outputs:
        assert {PHASES[i] for i in output.phase} == {"prefill"}
        assert set(output.launch_requests) == {1}
        assert set(output.chunk_start) == {0}
        assert output.finish_reason == "length"


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("chunk", [1, 7, 33, 64, 1000])
def test_chunks_of_any_size_give_the_logprobs_of_a_whole_pass(checkpoint, device, backend, chunk):
    prompts, traces = random_prompts([1, 30, 33]), random_traces(3, 35)
    whole = score(passes(checkpoint("gemma3"), device), prompts, traces)
    harness = passes(checkpoint("gemma3"), device, attention_backend=backend, prefill_chunk=chunk)
    outputs = score(harness, prompts, traces)
    assert worst_delta(whole, outputs) < TOLERANCE
    for prompt, output in zip(prompts, outputs, strict=True):
        starts = [(position - 1) // chunk * chunk for position in output.position.tolist()]
        assert output.chunk_start.tolist() == starts
        assert {PHASES[i] for i in output.phase} == {"prefill"}
        assert output.position[0] == len(prompt)
    assert max(max(launch) for launch in harness.launches) <= chunk
    sizes = [len(p) + 34 for p in prompts]
    assert sum(sum(launch) for launch in harness.launches) == sum(sizes)


def test_the_triton_backend_takes_chunks(checkpoint, device):
    prompts, traces = random_prompts([9]), random_traces(1, 10)
    whole = score(passes(checkpoint("gemma3"), device), prompts, traces)
    changes = {"attention_backend": "triton", "prefill_chunk": 5}
    assert (
        worst_delta(whole, score(passes(checkpoint("gemma3"), device, **changes), prompts, traces))
        < TOLERANCE
    )


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
def test_logits_exist_for_a_block_of_rows_at_a_time(checkpoint, device, family):
    """The head sees `HEAD_ROWS` rows at most, the decoder every token once."""
    harness = passes(checkpoint(family), device, max_model_len=256)
    model = harness.loaded.model
    head_rows, decoder_tokens, scored = [], [], []
    model.get_output_embeddings().register_forward_hook(
        lambda module, args, out: head_rows.append(tuple(out.shape))
    )
    next(iter(model.get_decoder().children())).register_forward_hook(
        lambda module, args, out: decoder_tokens.append(out.shape[1])
    )
    sampler = harness.built.engine._runner._sampler
    partials = sampler._kernels.vocabulary_partials

    def spy(logits, multipliers):
        scored.append(logits.shape[0])
        return partials(logits, multipliers)

    sampler._kernels = replace(sampler._kernels, vocabulary_partials=spy)
    length = 2 * HEAD_ROWS + 3
    output = score(harness, random_prompts([10]), random_traces(1, length))[0]
    assert head_rows == [(1, n, VOCABULARY) for n in (HEAD_ROWS, HEAD_ROWS, 3)]
    assert scored == [HEAD_ROWS, HEAD_ROWS, 3]
    assert decoder_tokens == [10 + length - 1]
    assert len(output.logprob) == length


def test_a_failed_pass_leaves_the_model_as_it_was(checkpoint, device):
    harness = passes(checkpoint(), device)
    decoder = harness.loaded.model.get_decoder()
    sampler = harness.built.engine._runner._sampler
    harness.built.engine._runner._sampler = _Failing()
    with pytest.raises(ZeroDivisionError):
        score(harness, [[5, 6]], [[7, 8]])
    harness.built.engine._runner._sampler = sampler
    assert "forward" not in vars(decoder)


class _Failing:
    def __call__(self, *args, **kwargs):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("tensor", "pipeline", "family", "chunk"),
    [
        (2, 1, "llama-tied", 0),
        (2, 1, "granite", 0),
        (2, 1, "qwen3-moe", 0),
        (1, 2, "llama-tied", 0),
        (1, 2, "granite", 0),
        (1, 2, "gemma3", 9),
        (1, 3, "qwen3-moe", 0),
        (2, 2, "llama-tied", 9),
    ],
)
def test_ranks_give_the_pass_of_one(checkpoint, device, tensor, pipeline, family, chunk):
    prompts, traces = random_prompts([1, 20, 33]), random_traces(3, 70)
    whole = score(passes(checkpoint(family), device, prefill_chunk=chunk), prompts, traces)
    with emulated_harness(
        checkpoint(family), device, emulated(tensor, pipeline), path="prefill", prefill_chunk=chunk
    ) as harness:
        outputs = score(harness, prompts, traces)
    if tensor == 1:
        assert differing_columns(whole, outputs) == set()
    assert worst_delta(whole, outputs) < TOLERANCE


def test_record_of_given_tokens_draws_the_support_that_decode_draws(checkpoint, device):
    prompts, traces = random_prompts(LENGTHS), random_traces(len(LENGTHS), 12)
    decoded = score(Harness.make(checkpoint(), device), prompts, traces)
    scored = score(passes(checkpoint(), device), prompts, traces)
    for a, b in zip(decoded, scored, strict=True):
        check_supports_agree(a, b, 2 * TOLERANCE)
        assert (a.rank == b.rank).all()
        assert np.abs(a.log_tail_mass - b.log_tail_mass).max() < 2 * TOLERANCE


def test_the_cache_needs_to_hold_one_sequence_only(checkpoint, device):
    prompts, traces = random_prompts([20, 30, 25, 18]), random_traces(4, 40)
    harness = passes(checkpoint(), device, num_kv_blocks=9)
    outputs = score(harness, prompts, traces)
    assert [o.token_ids.tolist() for o in outputs] == traces
    assert harness.built.engine.counters.preemptions == 0
    assert harness.built.engine._scheduler.pool.num_free == 9
    # Fitted to one sequence of max_model_len = 128 in blocks of 8.
    assert passes(checkpoint(), device).built.num_kv_blocks == 16


def test_a_request_without_a_trace_is_refused_and_the_next_one_runs(checkpoint, device):
    harness = passes(checkpoint(), device)
    with pytest.raises(RequestError, match='path = "prefill" scores tokens that are given'):
        harness.request(0, [5, 6], max_tokens=3)
    assert score(harness, [[5, 6]], [[7]])[0].token_ids.tolist() == [7]


def test_a_float32_head_is_used_by_a_pass(checkpoint, device):
    prompts = random_prompts([5, 20])
    decoded = Harness.make(checkpoint(), device, torch.bfloat16, head_dtype=torch.float32).record(
        prompts, 6
    )
    scored = passes(checkpoint(), device, torch.bfloat16, head_dtype=torch.float32)
    for output in scored.replay(prompts, decoded):
        logits = torch.from_numpy(output.top_logprobs + output.logsumexp[:, None])
        assert not torch.equal(logits, logits.bfloat16().float())
