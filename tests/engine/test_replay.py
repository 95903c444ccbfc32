"""The engine end to end: a replay is the record, bit for bit, whatever else is in the batch.

The same under tensor and pipeline parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.parallel.emulated import emulated, emulated_harness
from tests.tiny import VOCABULARY, Harness, differing_columns, random_prompts
from trace_audit.engine.request import PHASES
from trace_audit.errors import RequestError
from trace_audit.kernels.statistics import StatisticsKernels

# On both sides of the block size, above the sliding window, and one over the token budget.
LENGTHS = [3, 8, 9, 31, 70, 17]
LAYOUTS = {"single": (1, 1), "tp2": (2, 1), "pp2": (1, 2)}
HALF = [torch.float32, torch.bfloat16]


@pytest.fixture(params=LAYOUTS)
def make(request) -> Iterator[Callable[..., Harness]]:
    """Makes engines of one rank, of two that share every layer, or of two pipeline stages."""
    tensor, pipeline = LAYOUTS[request.param]
    with ExitStack() as stack:

        def make(directory: Path, device: torch.device, *args: Any, **changes: Any) -> Harness:
            if tensor * pipeline == 1:
                return Harness.make(directory, device, *args, **changes)
            parallel = emulated(tensor, pipeline)
            return stack.enter_context(
                emulated_harness(directory, device, parallel, *args, **changes)
            )

        yield make


@pytest.mark.parametrize("backend", ["eager", "sdpa", "triton"])
@pytest.mark.parametrize("dtype", HALF)
def test_replay_reproduces_the_recorded_run_bit_for_bit(checkpoint, device, make, backend, dtype):
    prompts = random_prompts(LENGTHS if backend != "triton" else LENGTHS[:4])
    steps = 12 if backend != "triton" else 4
    record = make(checkpoint(), device, dtype, attention_backend=backend)
    recorded = record.record(prompts, steps)
    replay = make(checkpoint(), device, dtype, attention_backend=backend)
    replayed = replay.replay(prompts, recorded)
    assert differing_columns(recorded, replayed) == set()
    assert record.launches == replay.launches
    assert all(len(o.token_ids) == steps for o in replayed)


def test_replay_in_another_dtype_keeps_the_tokens_and_moves_the_logprobs(checkpoint, device, make):
    prompts = random_prompts(LENGTHS)
    recorded = make(checkpoint(), device).record(prompts)
    replayed = make(checkpoint(), device, torch.bfloat16).replay(prompts, recorded)
    assert differing_columns(recorded, replayed) >= {"logprob", "logits_hash"}
    for a, b in zip(recorded, replayed, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert np.abs(a.logprob - b.logprob).max() < 0.5


def test_tokens_that_are_not_the_argmax_are_replayed_exactly_eos_included(checkpoint, device):
    harness = Harness.make(checkpoint(), device)
    prompt = random_prompts([10])[0]
    trace = [300, 2, 7, 2, 511, 0, 2]  # 2 is the model's EOS
    output = harness.run([harness.request(0, prompt, trace_decode_token_ids=trace)])[0]
    assert output.token_ids.tolist() == trace
    assert output.finish_reason == "length"
    with torch.inference_mode():
        harness.loaded.model.config._attn_implementation = "eager"
        ids = torch.tensor([prompt + trace], device=device)
        logits = harness.loaded.model(input_ids=ids, use_cache=False).logits[0].float()
    logits = logits[len(prompt) - 1 : -1].cpu()
    chosen = logits.gather(1, torch.tensor(trace)[:, None])
    assert output.rank.tolist() == (1 + (logits > chosen).sum(-1)).tolist()
    want = torch.log_softmax(logits, -1).gather(1, torch.tensor(trace)[:, None])[:, 0]
    assert np.abs(output.logprob - want.numpy()).max() < 1e-4
    assert max(output.rank) > 50


def test_a_free_request_ends_at_eos_and_a_replay_of_it_has_the_same_launches(
    checkpoint, device, make
):
    prompts = random_prompts(LENGTHS)
    free = make(checkpoint(), device).record(prompts, 30)
    # A token that greedy decoding produces midway plays the end of sequence.
    eos = int(free[2].token_ids[7])
    record = make(checkpoint(), device)
    requests = [
        record.request(i, p, max_tokens=30, stop_token_ids=(eos,), ignore_eos=True)
        for i, p in enumerate(prompts)
    ]
    recorded = record.run(requests)
    assert {o.finish_reason for o in recorded} >= {"stop"}
    assert any(len(o.token_ids) < 30 for o in recorded)
    assert all(o.token_ids[-1] == eos for o in recorded if o.finish_reason == "stop")
    replay = make(checkpoint(), device)
    replayed = replay.replay(prompts, recorded)
    assert replay.launches == record.launches
    assert differing_columns(recorded, replayed) <= {"finish_reason"}


def test_the_models_own_eos_ends_a_free_request_unless_ignored(checkpoint, device, make):
    harness = make(checkpoint(), device)
    prompt = random_prompts([9])[0]
    harness.built.input_processor.eos_token_ids = frozenset(
        {int(harness.record([prompt], 5)[0].token_ids[2])}
    )
    assert len(harness.record([prompt], 5, ignore_eos=False)[0].token_ids) <= 3
    assert len(harness.record([prompt], 5)[0].token_ids) == 5


def test_a_mixed_batch_leaves_free_requests_as_they_are(checkpoint, device, make):
    prompts = random_prompts([6, 11, 23, 9])
    free = make(checkpoint(), device).record(prompts)
    traces = {1: [5] * 12, 3: list(range(12))}
    mixed = make(checkpoint(), device)
    outputs = mixed.run(
        [
            mixed.request(i, p, trace_decode_token_ids=traces[i])
            if i in traces
            else mixed.request(i, p, max_tokens=12, ignore_eos=True)
            for i, p in enumerate(prompts)
        ]
    )
    for i in (0, 2):
        assert differing_columns([free[i]], [outputs[i]]) == set()
    for i, trace in traces.items():
        assert outputs[i].token_ids.tolist() == trace


def test_more_requests_than_slots_and_a_free_one_in_a_reused_slot(checkpoint, device, make):
    prompts = random_prompts([5, 6, 7, 8, 9, 10, 11])
    harness = make(checkpoint(), device, max_num_seqs=2)
    requests = [
        harness.request(i, p, trace_decode_token_ids=[100 + i] * (i + 2))
        for i, p in enumerate(prompts[:-1])
    ]
    requests.append(harness.request(6, prompts[-1], max_tokens=6, ignore_eos=True))
    outputs = harness.run(requests)
    for i, output in enumerate(outputs[:-1]):
        assert output.token_ids.tolist() == [100 + i] * (i + 2)
    alone = make(checkpoint(), device, max_num_seqs=2)
    assert outputs[-1].token_ids.tolist() == alone.record(prompts[-1:], 6)[0].token_ids.tolist()
    assert max(len(launch) for launch in harness.launches) == 2


def test_traces_of_different_lengths_shrink_the_batch(checkpoint, device, make):
    prompts = random_prompts([5, 5, 5, 5])
    harness = make(checkpoint(), device)
    outputs = harness.run(
        [
            harness.request(i, p, trace_decode_token_ids=[50 + i] * n)
            for i, (p, n) in enumerate(zip(prompts, [1, 3, 6, 9], strict=True))
        ]
    )
    assert [len(o.token_ids) for o in outputs] == [1, 3, 6, 9]
    assert [len(launch) for launch in harness.launches] == [4, 3, 3, 2, 2, 2, 1, 1, 1]


def test_chunked_prefill_commits_once_and_keeps_the_traces_start(checkpoint, device, make):
    prompt = random_prompts([100])[0]
    harness = make(checkpoint(), device, max_num_batched_tokens=16, max_model_len=128)
    trace = [11, 12, 13]
    output = harness.run([harness.request(0, prompt, trace_decode_token_ids=trace)])[0]
    assert output.token_ids.tolist() == trace
    assert harness.launches == [(16,)] * 6 + [(4,), (1,), (1,)]
    assert output.chunk_start.tolist() == [96, 100, 101]
    assert [PHASES[i] for i in output.phase] == ["prefill", "decode", "decode"]
    assert output.position.tolist() == [100, 101, 102]
    whole = make(checkpoint(), device, max_num_batched_tokens=128)
    other = whole.run([whole.request(0, prompt, trace_decode_token_ids=trace)])[0]
    assert np.abs(output.logprob - other.logprob).max() < 1e-4


@pytest.mark.parametrize("change", [{"max_model_len": 256}, {"num_kv_blocks": 200}])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_room_to_spare_changes_no_byte(checkpoint, device, backend, change):
    prompts = random_prompts(LENGTHS)
    base = {"attention_backend": backend, "num_kv_blocks": 100}
    a = Harness.make(checkpoint(), device, torch.bfloat16, **base).record(prompts)
    b = Harness.make(checkpoint(), device, torch.bfloat16, **(base | change)).record(prompts)
    assert differing_columns(a, b) == set()


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preemption_commits_the_same_tokens(checkpoint, device, make, preemption):
    prompts = random_prompts([20, 30, 25, 18])
    ample = make(checkpoint(), device).record(prompts, 40)
    # 4 sequences of up to 70 tokens need 33 blocks of 8.
    tight = make(checkpoint(), device, num_kv_blocks=20, preemption=preemption)
    outputs = tight.replay(prompts, ample)
    counters = tight.built.engine.counters
    assert counters.preemptions > 0
    assert (counters.swapped_blocks > 0) == (preemption == "swap")
    assert (counters.recomputed_tokens > 0) == (preemption == "recompute")
    for a, b in zip(ample, outputs, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert np.abs(a.logprob - b.logprob).max() < 1e-4


def test_swapped_and_never_preempted_rows_agree_bit_for_bit_at_equal_launches(checkpoint, device):
    """Eager attention and one row a launch: nothing but the swap itself could differ."""
    prompts = random_prompts([20, 30])
    kept = Harness.make(checkpoint(), device)
    runner = kept.built.engine._runner
    plain = kept.record(prompts[:1], 10)
    request = kept.request(0, prompts[0], max_tokens=10, ignore_eos=True)
    engine = kept.built.engine
    engine._scheduler.add(request)
    with torch.inference_mode():
        for _ in range(4):
            engine.step()
        engine._scheduler._preempt(request)
        for cache in runner.kv_cache.tensors:
            cache.fill_(float("nan"))  # what was swapped out must come back from the host
        while engine._scheduler.has_work:
            engine.step()
        swapped = engine._outputs.collect([request])
    assert engine.counters.preemptions == 1
    assert differing_columns(plain, swapped) == set()


def test_a_request_that_can_never_fit_is_refused_and_the_others_run(checkpoint, device, make):
    harness = make(checkpoint(), device, num_kv_blocks=4)
    big = harness.request(0, random_prompts([40])[0], max_tokens=4)
    with pytest.raises(RequestError, match="num_kv_blocks"):
        harness.run([big])
    small = harness.request(1, random_prompts([10])[0], max_tokens=4, ignore_eos=True)
    assert len(harness.run([small])[0].token_ids) == 4


def test_two_requests_of_one_id_are_refused(checkpoint, device, make):
    harness = make(checkpoint(), device)
    request = harness.request(0, [5, 6], max_tokens=2)
    with pytest.raises(RequestError, match="same id"):
        harness.run([request, request])


def test_without_the_switch_no_state_exists(checkpoint, device):
    harness = Harness.make(checkpoint(), device, enable_trace_replay=False)
    assert harness.built.engine._runner.trace_replay is None
    with pytest.raises(RequestError, match="enable_trace_replay"):
        harness.request(0, [5], trace_decode_token_ids=[1])
    assert len(harness.record([[5, 6]], 3)[0].token_ids) == 3


@pytest.mark.parametrize("params", [{}, {"temperature": 0.7, "seed": 3}])
def test_the_sampler_leaves_the_logits_bytes_alone(checkpoint, device, params):
    harness = Harness.make(checkpoint(), device, torch.bfloat16)
    sampler = harness.built.engine._runner._sampler
    kernels, seen = sampler._kernels, []

    def spying(kernel):
        def spy(logits, *arguments):
            seen.append((logits, logits.clone()))
            return kernel(logits, *arguments)

        return spy

    sampler._kernels = StatisticsKernels(**{n: spying(k) for n, k in vars(kernels).items()})
    harness.record(random_prompts([5, 9]), 4, **params)
    assert len(seen) >= 5 * 4
    assert all(torch.equal(now, then) for now, then in seen)


def test_seeded_sampling_depends_on_seed_index_and_step_alone(checkpoint, device, make):
    prompts = random_prompts([5, 9, 14])
    hot = {"temperature": 1.5, "seed": 7}
    together = make(checkpoint(), device).record(prompts, 10, **hot)
    harness = make(checkpoint(), device, max_num_seqs=1)
    apart = harness.record(prompts, 10, **hot)
    other = make(checkpoint(), device).record(prompts, 10, temperature=1.5, seed=8)
    tokens = [o.token_ids.tolist() for o in together]
    assert tokens == [o.token_ids.tolist() for o in apart]
    assert tokens != [o.token_ids.tolist() for o in other]
    assert any(rank > 1 for o in together for rank in o.rank)


def test_a_sampled_trace_is_replayed_greedily_to_the_same_bits(checkpoint, device, make):
    prompts = random_prompts([5, 9, 14])
    recorded = make(checkpoint(), device).record(prompts, 10, temperature=1.5, seed=7)
    replayed = make(checkpoint(), device).replay(prompts, recorded)
    assert differing_columns(recorded, replayed) == set()


def test_the_support_is_the_top_ids_and_draws_from_the_tail(checkpoint, device, make):
    output = make(checkpoint(), device).record(random_prompts([5]), 8)[0]
    assert output.support_token_ids.shape == (8, 24)
    assert (output.support_token_ids[:, :5] == output.top_token_ids).all()
    assert (output.support_token_ids[:, 0] == output.token_ids).all()
    for row in output.support_token_ids.tolist():
        assert len(set(row[:20])) == 20
        assert not set(row[20:]) & set(row[:20])
        assert all(0 <= v < VOCABULARY for v in row)
    mass = np.exp(output.support_logprobs[:, :20].astype(np.float64)).sum(1)
    tail = np.exp(output.log_tail_mass.astype(np.float64))
    assert np.abs(mass + tail - 1).max() < 1e-5


def test_a_non_finite_row_is_visible_and_stops_nothing(checkpoint, device):
    harness = Harness.make(checkpoint(), device)
    with torch.no_grad():
        harness.loaded.model.get_output_embeddings().weight[5] = float("nan")
    output = harness.record(random_prompts([5]), 3)[0]
    assert np.isnan(output.logprob).all()
    assert (output.rank == 0).all()
    assert (output.support_token_ids == -1).all()
    assert len(output.token_ids) == 3
