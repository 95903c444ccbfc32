"""Preemption, slots and mixed batches: what pressure changes, and what it must not.

Cases 19 and 20: no request's tokens reach another's row, in whatever slot or block it lands.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tiny import Harness, differing_columns, random_prompts
from trace_audit.engine.request import PHASES, Request, RequestOutput

HALF = [torch.float32, torch.bfloat16]
# Each needs up to 18 blocks of 2 tokens at its end, and six of them share 36.
PROMPTS = random_prompts([2 + i % 5 for i in range(12)])
STEPS = 30
SIZES = {"max_num_seqs": 6, "max_num_batched_tokens": 8, "block_size": 2}
FIXED = SIZES | {"fixed_batch": True}
TIGHT = {"num_kv_blocks": 36}
MANY = 20


def counters_balance(harness: Harness, *, swap: bool) -> None:
    """More than a few preemptions, of the kind that was asked for, and nothing leaked."""
    engine = harness.built.engine
    assert engine.counters.preemptions > MANY
    assert (engine.counters.swapped_blocks > 0) == swap
    assert (engine.counters.recomputed_tokens > 0) == (not swap)
    nothing_leaked(harness)


def nothing_leaked(harness: Harness) -> None:
    engine = harness.built.engine
    pool, runner = engine._scheduler.pool, engine._runner
    assert sorted(pool._free) == list(range(pool.num_blocks))
    assert len(runner.request_state._free_slots) == len(runner.request_state.total_len.gpu)
    assert runner._swapped == {}
    assert not runner.trace_replay.trace_len.np.any()
    assert not engine._scheduler.has_work


@pytest.fixture(scope="module")
def ample(checkpoint, device) -> Callable[[torch.dtype, bool], list[RequestOutput]]:
    """The unpressured run of a dtype, made once."""
    made: dict[tuple[torch.dtype, bool], list[RequestOutput]] = {}

    def get(dtype: torch.dtype, fixed: bool) -> list[RequestOutput]:
        if (dtype, fixed) not in made:
            changes = FIXED if fixed else SIZES
            harness = Harness.make(checkpoint("llama-2l"), device, dtype, **changes)
            made[dtype, fixed] = harness.record(PROMPTS, STEPS)
            assert harness.built.engine.counters.preemptions == 0
        return made[dtype, fixed]

    return get


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("free", [False, True])
def test_swapping_changes_no_bit_of_a_fixed_batch(checkpoint, device, ample, dtype, free):
    """Replayed and free: a free request would go on from another token at the first wrong bit."""
    unpressured = ample(dtype, True)
    harness = Harness.make(checkpoint("llama-2l"), device, dtype, **FIXED, **TIGHT)
    pressed = harness.record(PROMPTS, STEPS) if free else harness.replay(PROMPTS, unpressured)
    counters_balance(harness, swap=True)
    assert differing_columns(unpressured, pressed) == set()


def test_without_a_fixed_batch_swapping_moves_float32_by_its_last_bits(checkpoint, device, ample):
    unpressured = ample(torch.float32, False)
    harness = Harness.make(checkpoint("llama-2l"), device, **SIZES, **TIGHT)
    pressed = harness.replay(PROMPTS, unpressured)
    counters_balance(harness, swap=True)
    assert same_tokens(unpressured, pressed)
    assert 0 < worst(unpressured, pressed) <= 5e-5


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("fixed", [False, True])
def test_recomputing_ends_with_the_same_tokens_and_its_drift_is_small(
    checkpoint, device, ample, dtype, fixed, record_property
):
    unpressured = ample(dtype, fixed)
    changes = FIXED if fixed else SIZES
    harness = Harness.make(
        checkpoint("llama-2l"), device, dtype, preemption="recompute", **changes, **TIGHT
    )
    pressed = harness.replay(PROMPTS, unpressured)
    counters_balance(harness, swap=False)
    assert same_tokens(unpressured, pressed)
    drift = worst(unpressured, pressed)
    record_property("max_abs_delta_logprob", drift)
    if dtype == torch.float32:
        assert 0 < drift <= 5e-5


def test_a_recomputed_request_is_rebuilt_by_a_prefill_of_its_own(checkpoint, device):
    prompts = random_prompts([20, 22])
    sizes = {"max_num_batched_tokens": 16, "num_kv_blocks": 7, "fixed_batch": True}
    harness = Harness.make(checkpoint("llama-2l"), device, preemption="recompute", **sizes)
    outputs = harness.record(prompts, 20)
    assert harness.built.engine.counters.preemptions == 1
    preempted = harness.built.engine.counters.recomputed_tokens
    alone = [launch for launch in harness.launches if max(launch) > 1]
    # Two prompts, and the second again with all it had: chunks of 16, and nobody beside.
    assert alone[:4] == [(16,), (4,), (16,), (6,)]
    assert sum(tokens for (tokens,) in alone[4:]) == preempted + 1
    assert all(tokens == 16 for (tokens,) in alone[4:-1])
    phases = [PHASES[i] for i in outputs[1].phase]
    # The first token of a prompt and the first after a rebuild come from a prefill.
    assert phases.count("prefill") == 2
    assert [PHASES[i] for i in outputs[0].phase].count("prefill") == 1


def mixed(harness: Harness) -> list[Request]:
    """Every second request replays tokens that no model would choose, the others are free."""
    return [
        harness.request(i, prompt, trace_decode_token_ids=odd_trace(i))
        if i % 2
        else harness.request(i, prompt, max_tokens=STEPS, ignore_eos=True)
        for i, prompt in enumerate(PROMPTS)
    ]


def odd_trace(i: int) -> list[int]:
    return [(7 * i + 13 * step) % 512 for step in range(STEPS - i // 2)]


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_replayed_and_free_requests_share_a_cache_that_is_too_small(
    checkpoint, device, ample, preemption
):
    """A free request that comes into the slot of a replayed one continues as it would alone."""
    free = ample(torch.float32, True)
    harness = Harness.make(checkpoint("llama-2l"), device, preemption=preemption, **FIXED, **TIGHT)
    outputs = harness.run(mixed(harness))
    assert harness.built.engine.counters.preemptions > MANY
    nothing_leaked(harness)
    for i, output in enumerate(outputs):
        if i % 2:
            assert output.token_ids.tolist() == odd_trace(i)
        elif preemption == "swap":
            assert differing_columns([free[i]], [output]) == set()
        else:
            assert output.token_ids.tolist() == free[i].token_ids.tolist()


def test_a_normal_request_after_a_replayed_one_is_as_if_nothing_had_been(checkpoint, device, ample):
    """Case 20: slots, rows and lengths of the replay before are gone."""
    for tight in ({}, TIGHT):
        harness = Harness.make(checkpoint("llama-2l"), device, **FIXED, **tight)
        harness.run(mixed(harness))
        again = harness.record(PROMPTS, STEPS)
        assert differing_columns(ample(torch.float32, True), again) == set()
        nothing_leaked(harness)


def test_a_queue_longer_than_the_slots_reuses_each_of_them(checkpoint, device):
    harness = Harness.make(checkpoint("llama-2l"), device, **FIXED | {"max_num_seqs": 2})
    slots: dict[int, set[str]] = {}
    runner = harness.built.engine._runner
    admit = runner.admit

    def noted(request: Request) -> None:
        admit(request)
        slots.setdefault(request.slot, set()).add(request.request_id)

    harness.built.engine._scheduler.hooks.admit = noted  # type: ignore[method-assign]
    outputs = harness.run(mixed(harness))
    for i in range(1, len(PROMPTS), 2):
        assert outputs[i].token_ids.tolist() == odd_trace(i)
    assert set(slots) == {0, 1}
    assert all(len(requests) > 2 for requests in slots.values())
    assert max(map(len, harness.launches)) == 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", HALF)
def test_the_demo_model_under_pressure(device, dtype):
    """The same on a model of real size: more than twenty preemptions, not a bit."""
    from trace_audit.models.demo import demo_model
    from trace_audit.storage.fingerprint import cache_dir

    directory: Path = demo_model(cache_dir())
    prompts = random_prompts([4 + 2 * (i % 5) for i in range(16)])
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "max_model_len": 64}
    engine = {"attention_backend": "sdpa", "block_size": 2, "fixed_batch": True, **sizes}
    unpressured = Harness.make(directory, device, dtype, **engine).record(prompts, 24)
    harness = Harness.make(directory, device, dtype, num_kv_blocks=44, **engine)
    pressed = harness.replay(prompts, unpressured)
    counters_balance(harness, swap=True)
    assert differing_columns(unpressured, pressed) == set()
    recompute = Harness.make(
        directory, device, dtype, num_kv_blocks=44, preemption="recompute", **engine
    )
    outputs = recompute.replay(prompts, unpressured)
    counters_balance(recompute, swap=False)
    assert same_tokens(unpressured, outputs)


def same_tokens(a: list[RequestOutput], b: list[RequestOutput]) -> bool:
    return [o.token_ids.tolist() for o in a] == [o.token_ids.tolist() for o in b]


def worst(a: list[RequestOutput], b: list[RequestOutput]) -> float:
    return max(float(np.abs(x.logprob - y.logprob).max()) for x, y in zip(a, b, strict=True))
