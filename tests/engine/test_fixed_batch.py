"""`fixed_batch`: a sequence's columns do not depend on who else runs, on slots or on order.

Cases 21 and 24: what stands beside a sequence, and in which order it came, changes no byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.parallel.emulated import emulated, emulated_harness
from tests.tiny import Harness, differing_columns, engine_config, random_prompts
from trace_audit.engine.build import build_engine
from trace_audit.engine.fixed_batch import num_decode_rows
from trace_audit.engine.request import PHASES, RequestOutput
from trace_audit.errors import ConfigError
from trace_audit.models.loader import load_model

HALF = [torch.float32, torch.bfloat16]
# A prompt of one token, both sides of the block size and of a prefill chunk, and several chunks.
LENGTHS = [1, 3, 8, 9, 16, 17, 40, 33]
STEPS = 6
# Padded to 16 rows, which requests never fill.
WIDE = {"fixed_batch": True, "max_num_seqs": 13, "max_num_batched_tokens": 16}


def prompts_of(count: int) -> list[list[int]]:
    return random_prompts([LENGTHS[i % len(LENGTHS)] for i in range(count)])


def run(harness: Harness, order: Sequence[int], prompts: list[list[int]]) -> list[RequestOutput]:
    """Free requests that arrive in this order; their outputs in order of index."""
    requests = [
        harness.request(i, prompts[i], max_tokens=STEPS + i % 3, ignore_eos=True) for i in order
    ]
    outputs = harness.run(requests)
    return [output for _, output in sorted(zip(order, outputs, strict=True))]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_a_sequence_is_the_same_alone_among_others_and_in_any_order(
    checkpoint, device, backend, dtype
):
    prompts = prompts_of(32)
    make = lambda: Harness.make(  # noqa: E731
        checkpoint(), device, dtype, attention_backend=backend, **WIDE
    )
    together = run(make(), range(32), prompts)
    for order in (range(31, -1, -1), np.random.default_rng(0).permutation(32).tolist()):
        assert differing_columns(together, run(make(), order, prompts)) == set()
    harness = make()
    for i in range(len(LENGTHS)):
        assert differing_columns([together[i]], run(harness, [i], prompts)) == set()


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_without_the_switch_a_float32_sequence_does_depend_on_the_others(
    checkpoint, device, backend
):
    """The control: what the test above compares would differ."""
    prompts = prompts_of(13)
    harness = Harness.make(
        checkpoint(), device, attention_backend=backend, **(WIDE | {"fixed_batch": False})
    )
    together = run(harness, range(13), prompts)
    lone = [run(harness, [i], prompts)[0] for i in range(4)]
    assert "logits_hash" in differing_columns(together[:4], lone)
    backwards = run(harness, range(12, -1, -1), prompts)
    assert "logits_hash" in differing_columns(together, backwards)


@pytest.mark.parametrize("dtype", HALF)
def test_the_triton_backend_keeps_a_sequence_to_itself(checkpoint, device, dtype):
    prompts = random_prompts([9, 3, 12])
    make = lambda: Harness.make(  # noqa: E731
        checkpoint(),
        device,
        dtype,
        attention_backend="triton",
        fixed_batch=True,
        max_num_seqs=3,
        max_num_batched_tokens=8,
    )
    harness = make()
    together = harness.record(prompts, 3)
    assert differing_columns(together[:1], harness.record(prompts[:1], 3)) == set()
    backwards = [harness.request(i, prompts[i], max_tokens=3, ignore_eos=True) for i in (2, 1, 0)]
    assert differing_columns(together, harness.run(backwards)[::-1]) == set()


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
@pytest.mark.parametrize("dtype", HALF)
def test_split_models_keep_a_sequence_to_itself(checkpoint, device, sizes, dtype):
    prompts = random_prompts([9, 3, 20])
    with emulated_harness(checkpoint(), device, emulated(*sizes), dtype, **WIDE) as harness:
        together = harness.record(prompts, 4)
        for i in (2, 0):
            request = harness.request(i, prompts[i], max_tokens=4, ignore_eos=True)
            assert differing_columns([together[i]], harness.run([request])) == set()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("backend", ["eager", "sdpa", "triton"])
def test_products_of_real_sizes_keep_a_sequence_to_itself(tmp_path, device, backend, dtype):
    """Shapes for which a GPU's library chooses among many kernels."""
    save_wide(tmp_path)
    harness = Harness.make(
        tmp_path,
        device,
        dtype,
        attention_backend=backend,
        fixed_batch=True,
        max_num_seqs=32,
        max_num_batched_tokens=256,
        max_model_len=512,
    )
    prompts = random_prompts([7 + 13 * i for i in range(32)])
    together = run(harness, range(32), prompts)
    backwards = run(harness, range(31, -1, -1), prompts)
    assert differing_columns(together, backwards) == set()
    for i in (0, 5, 31):
        assert differing_columns([together[i]], run(harness, [i], prompts)) == set()


def save_wide(directory: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=4,
        eos_token_id=None,
        bos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)


def test_a_launch_is_one_prompts_chunk_or_every_decode_row(checkpoint, device):
    prompts = random_prompts([20, 5, 40])
    harness = Harness.make(checkpoint(), device, **WIDE)
    outputs = harness.record(prompts, 3)
    assert harness.launches == [(16,), (4,), (5,), (16,), (16,), (8,), (1, 1, 1), (1, 1, 1)]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert [PHASES[i] for i in output.phase] == ["prefill", "decode", "decode"]
        last_chunk = (len(prompt) - 1) % 16 + 1
        # The launch as it was computed: padding is part of its shape.
        assert output.launch_tokens.tolist() == [last_chunk, 16, 16]
        assert output.launch_requests.tolist() == [1, 16, 16]


def test_every_product_of_a_decode_launch_has_the_fixed_number_of_rows(checkpoint, device):
    harness = Harness.make(checkpoint(), device, **WIDE)
    shapes = []
    model = harness.loaded.model
    for module in (model.get_output_embeddings(), model.get_decoder().layers[0].mlp.up_proj):
        module.register_forward_hook(lambda _, inputs, __: shapes.append(inputs[0].shape[-2]))
    statistics = harness.built.engine._runner._sampler._kernels
    sampled = []

    def spying(kernel):
        def spy(logits, *arguments):
            sampled.append(len(logits))
            return kernel(logits, *arguments)

        return spy

    harness.built.engine._runner._sampler._kernels = replace(
        statistics,
        vocabulary_partials=spying(statistics.vocabulary_partials),
        token_counts=spying(statistics.token_counts),
    )
    harness.record(random_prompts([12]), 4)
    assert shapes == [12, 1] + [16] * 6
    assert sampled == [1, 1] + [16] * 6


def test_padding_is_never_committed_counted_or_written_to_the_cache(checkpoint, device):
    harness = Harness.make(checkpoint(), device, num_kv_blocks=8, **WIDE)
    told = []
    request = harness.request(0, random_prompts([5])[0], max_tokens=4, ignore_eos=True)
    (output,) = harness.built.engine.run([request], told.append)
    assert told == [1, 1, 1, 1]
    assert len(output.token_ids) == 4
    assert harness.built.engine.counters.steps == 4
    runner = harness.built.engine._runner
    for cache in (*runner.kv_cache.keys, *runner.kv_cache.values):
        written = cache.data.flatten(0, 1).flatten(1).any(1)
        # 5 of the prompt and 3 of the 4 outputs, at the front of the first block.
        assert written.nonzero().flatten().tolist() == list(range(8))
    assert runner.request_state.total_len.gpu[1:].sum() == 0


def test_what_neighbours_ask_of_the_sampler_changes_nothing(checkpoint, device):
    """Replayed, sampled and greedy rows share a launch; each is as without the others."""
    prompts = random_prompts([9, 5, 14, 7])
    harness = Harness.make(checkpoint(), device, **WIDE)
    recorded = harness.record(prompts, 5)

    def request(kind: str, i: int):
        asked: dict[str, Any] = {"max_tokens": 5, "ignore_eos": True}
        if kind == "sampled":
            return harness.request(i, prompts[i], temperature=1.3, seed=4, **asked)
        if kind == "replayed":
            output = recorded[i]
            trace = output.token_ids.tolist()
            return harness.request(
                i, prompts[i], output.support_token_ids, trace_decode_token_ids=trace
            )
        return harness.request(i, prompts[i], **asked)

    kinds = ["greedy", "sampled", "replayed", "greedy"]
    mixed = harness.run([request(kind, i) for i, kind in enumerate(kinds)])
    for i, kind in enumerate(kinds):
        assert differing_columns([mixed[i]], harness.run([request(kind, i)])) == set()
    for i in (0, 2, 3):
        assert differing_columns([mixed[i]], [recorded[i]]) == set()


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
def test_experts_that_multiply_all_sequences_tokens_together_are_refused(
    checkpoint, device, family
):
    with pytest.raises(ConfigError, match="route to it together"):
        Harness.make(checkpoint(family), device, **WIDE)


@pytest.mark.parametrize("dtype", HALF)
def test_experts_that_multiply_each_token_by_itself_keep_a_sequence_to_itself(
    checkpoint, device, dtype
):
    loaded = load_model(checkpoint("qwen3-moe"), dtype=dtype, device=device, lm_head_dtype=dtype)
    loaded.model.set_experts_implementation("batched_mm")
    built = build_engine(loaded, engine_config(device=device.type, **WIDE))
    harness = Harness.around(loaded, built)
    prompts = prompts_of(13)
    together = run(harness, range(13), prompts)
    backwards = run(harness, range(12, -1, -1), prompts)
    assert differing_columns(together, backwards) == set()
    for i in range(3):
        assert differing_columns([together[i]], run(harness, [i], prompts)) == set()


def test_a_machine_whose_rows_depend_on_their_place_is_refused(checkpoint, device):
    """As MKL does it: the last two rows of six, summed in another order."""
    loaded = load_model(
        checkpoint(), dtype=torch.float32, device=device, lm_head_dtype=torch.float32
    )

    def other_order(_module, _inputs, output):
        output[:, -2:] = torch.nextafter(output[:, -2:], torch.tensor(torch.inf, device=device))

    loaded.model.get_decoder().layers[1].mlp.up_proj.register_forward_hook(other_order)
    build_engine(loaded, engine_config(device=device.type))
    with pytest.raises(ConfigError, match=r"of 8 equal rows this machine computes 2 .*row 6 is"):
        build_engine(loaded, engine_config(device=device.type, fixed_batch=True))


@pytest.mark.parametrize(("max_num_seqs", "rows"), [(1, 8), (8, 8), (9, 16), (32, 32)])
def test_decode_launches_have_rows_that_no_thread_computes_alone(max_num_seqs, rows):
    assert num_decode_rows(max_num_seqs) == rows
