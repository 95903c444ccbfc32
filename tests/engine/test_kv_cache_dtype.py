"""Runs whose KV cache holds other numbers than the model computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kv_formats import QUANTIZED
from tests.parallel.emulated import emulated, emulated_harness
from tests.tiny import Harness, differing_columns, random_prompts
from trace_audit.engine import kv_memory
from trace_audit.errors import ConfigError

BACKENDS = ["eager", "sdpa", "triton"]
LENGTHS = [3, 8, 9, 31, 70, 17]
STEPS = 12
ALL = ["float32", "bfloat16", "float16", *QUANTIZED]


def shapes(backend: str) -> tuple[list[list[int]], int]:
    """Prompts and steps: fewer for the kernel, which may be interpreted."""
    if backend == "triton":
        return random_prompts(LENGTHS[:3]), 3
    return random_prompts(LENGTHS), STEPS


def deltas(a, b) -> np.ndarray:
    return np.concatenate([np.abs(x.logprob - y.logprob) for x, y in zip(a, b, strict=True)])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", QUANTIZED)
def test_a_replay_over_an_8_bit_cache_is_reproducible_and_moves_the_logprobs(
    checkpoint, device, backend, name
):
    prompts, steps = shapes(backend)
    options = {"attention_backend": backend}
    recorded = Harness.make(checkpoint(), device, torch.bfloat16, **options).record(prompts, steps)
    runs = [
        Harness.make(checkpoint(), device, torch.bfloat16, kv_cache_dtype=name, **options).replay(
            prompts, recorded
        )
        for _ in range(2)
    ]
    assert differing_columns(*runs) == set()
    assert [o.token_ids.tolist() for o in runs[0]] == [o.token_ids.tolist() for o in recorded]
    assert differing_columns(runs[0], recorded) >= {"logprob", "logits_hash"}
    assert np.isfinite(deltas(runs[0], recorded)).all()


@pytest.mark.parametrize("name", QUANTIZED)
def test_every_backend_stores_the_same_bits(checkpoint, device, name):
    """In the first layer, whose keys and values no attention has touched yet."""
    stored = []
    for backend in BACKENDS:
        harness = Harness.make(
            checkpoint("llama-9h"), device, attention_backend=backend, kv_cache_dtype=name
        )
        harness.record(random_prompts([9]), 1)
        cache = harness.built.engine._runner.kv_cache
        stored.append([*cache.keys[0].tensors, *cache.values[0].tensors])
    assert stored[0][0].any()
    for others in stored[1:]:
        assert all(torch.equal(a, b) for a, b in zip(stored[0], others, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_float32_cache_under_a_half_precision_model_changes_no_bit(
    checkpoint, device, backend, dtype
):
    prompts, steps = shapes(backend)
    runs = [
        Harness.make(
            checkpoint(), device, dtype, attention_backend=backend, kv_cache_dtype=name
        ).record(prompts, steps)
        for name in ("auto", "float32")
    ]
    assert differing_columns(*runs) == set()


def test_fewer_mantissa_bits_move_the_logprobs_further(checkpoint, device):
    prompts = random_prompts(LENGTHS)
    recorded = Harness.make(checkpoint(), device).record(prompts, STEPS)
    mean = {}
    for name in ALL:
        harness = Harness.make(checkpoint(), device, kv_cache_dtype=name)
        mean[name] = deltas(harness.replay(prompts, recorded), recorded).mean()
    assert mean["float32"] == 0
    # 10, 7, then about 6 (int8 of a whole head), 3 and 2 bits behind the point.
    order = ["float32", "float16", "bfloat16", "int8", "fp8_e4m3", "fp8_e5m2"]
    assert sorted(order, key=mean.__getitem__) == order


@pytest.mark.parametrize("name", ALL)
def test_the_cache_holds_what_its_name_says(checkpoint, device, name):
    harness = Harness.make(checkpoint(), device, torch.bfloat16, kv_cache_dtype=name)
    assert harness.built.backends["kv_cache"] == name
    cache = harness.built.engine._runner.kv_cache
    for side in (*cache.keys, *cache.values):
        assert side.data.dtype == kv_memory.KV_DTYPES[name]
        assert (side.scales is not None) == (name in ("int8", "fp8_per_token_head"))


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float32, "float32"), (torch.float16, "float16")]
)
def test_auto_is_the_models_dtype_and_is_named(checkpoint, device, dtype, name):
    harness = Harness.make(checkpoint(), device, dtype)
    assert harness.built.backends["kv_cache"] == name
    assert harness.built.engine._runner.kv_cache.keys[0].data.dtype == dtype


@pytest.mark.parametrize("name", QUANTIZED)
def test_pipeline_stages_change_no_bit(checkpoint, device, name):
    prompts = random_prompts(LENGTHS)
    options = {"attention_backend": "sdpa", "kv_cache_dtype": name}
    single = Harness.make(checkpoint(), device, **options).record(prompts, STEPS)
    with emulated_harness(checkpoint(), device, emulated(pipeline=2), **options) as split:
        assert differing_columns(single, split.record(prompts, STEPS)) == set()


@pytest.mark.parametrize("name", QUANTIZED)
def test_tensor_parallel_ranks_store_the_heads_of_their_own(checkpoint, device, name):
    """Of one token the first layer's keys come from whole columns: they are the single rank's."""
    prompt = random_prompts([1])
    single = Harness.make(checkpoint(), device, kv_cache_dtype=name)
    single.record(prompt, 1)
    whole = single.built.engine._runner.kv_cache.keys[0]
    with emulated_harness(checkpoint(), device, emulated(2), kv_cache_dtype=name) as split:
        split.record(prompt, 1)
        own = split.built.engine._runner.kv_cache.keys[0]
        assert own.data.shape[2] == 1
        for mine, theirs in zip(own.tensors, whole.tensors, strict=True):
            assert torch.equal(mine[0, 0, 0], theirs[0, 0, 0])
            assert mine[0, 0, 0].any()


@pytest.mark.parametrize("name", QUANTIZED)
def test_swapped_rows_come_back_bit_for_bit_with_their_scales(checkpoint, device, name):
    """Eager attention and one row a launch: nothing but the swap itself could differ."""
    prompts = random_prompts([20])
    harness = Harness.make(checkpoint(), device, torch.bfloat16, kv_cache_dtype=name)
    plain = harness.record(prompts, 10)
    request = harness.request(0, prompts[0], max_tokens=10, ignore_eos=True)
    engine = harness.built.engine
    engine._scheduler.add(request)
    with torch.inference_mode():
        for _ in range(4):
            engine.step()
        engine._scheduler._preempt(request)
        for tensor in engine._runner.kv_cache.tensors:
            tensor.fill_(77)  # what was swapped out must come back from the host
        while engine._scheduler.has_work:
            engine.step()
        swapped = engine._outputs.collect([request])
    assert engine.counters.preemptions == 1
    assert differing_columns(plain, swapped) == set()


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_preemption_commits_the_same_tokens(checkpoint, device, name, preemption):
    prompts = random_prompts([20, 30, 25, 18])
    ample = Harness.make(checkpoint(), device, kv_cache_dtype=name).record(prompts, 40)
    tight = Harness.make(
        checkpoint(), device, kv_cache_dtype=name, num_kv_blocks=20, preemption=preemption
    )
    outputs = tight.replay(prompts, ample)
    assert tight.built.engine.counters.preemptions > 0
    assert [o.token_ids.tolist() for o in outputs] == [o.token_ids.tolist() for o in ample]


@pytest.mark.parametrize("name", ["auto", *ALL])
def test_the_cache_takes_the_bytes_it_was_fitted_by(checkpoint, device, monkeypatch, name):
    budget = 200_000
    monkeypatch.setattr(kv_memory, "_memory_budget", lambda config, device: budget)
    harness = Harness.make(
        checkpoint(), device, torch.bfloat16, kv_cache_dtype=name, max_num_seqs=64
    )
    cache = harness.built.engine._runner.kv_cache
    stored = sum(tensor.nbytes for tensor in cache.tensors)
    block = stored // (harness.built.num_kv_blocks + 1)  # one is nobody's, for padding
    assert stored <= budget < stored + block
    # 8 tokens, 4 layers, keys and values, 2 heads of 16 numbers.
    element = kv_memory.KV_DTYPES["bfloat16" if name == "auto" else name].itemsize
    scale = 4 if name in ("int8", "fp8_per_token_head") else 0
    assert block == 8 * 4 * 2 * 2 * (16 * element + scale)


def test_what_does_not_fit_names_the_smaller_cache(checkpoint, device, monkeypatch):
    monkeypatch.setattr(kv_memory, "_memory_budget", lambda config, device: 10_000)
    with pytest.raises(ConfigError, match="needs 16") as caught:
        Harness.make(checkpoint(), device)
    assert caught.value.hint is not None
    assert "kv_cache_dtype" in caught.value.hint


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", QUANTIZED)
def test_a_non_finite_key_is_visible_in_the_rows(checkpoint, device, backend, name):
    harness = Harness.make(checkpoint(), device, attention_backend=backend, kv_cache_dtype=name)
    with torch.no_grad():
        harness.loaded.model.model.layers[0].self_attn.k_proj.weight[3] = float("nan")
    output = harness.record(random_prompts([5]), 2)[0]
    assert np.isnan(output.logprob).all()
    assert (output.rank == 0).all()
