"""Decode launches laid out on the device, or recorded as CUDA graphs: not a bit changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import HAS_CUDA
from tests.tiny import Harness, differing_columns, random_prompts
from trace_audit.engine import build
from trace_audit.engine.padding import in_buckets

# Interpreted kernels take seconds for what a GPU does in no time.
LENGTHS = [3, 8, 70, 31, 9, 17, 5] if HAS_CUDA else [3, 9, 5]
STEPS = 6 if HAS_CUDA else 2
MODES = ["device", pytest.param("cuda-graph", marks=pytest.mark.gpu)]


@pytest.fixture
def make(monkeypatch, device):
    """A harness whose decode launches run in a mode, padded as on a GPU whatever the device."""
    monkeypatch.setattr(build, "decode_padding", lambda config, on: in_buckets)

    def made(mode: str, directory: Path, *arguments: Any, **changes: Any) -> Harness:
        monkeypatch.setattr(build, "decode_mode", lambda *ignored: mode)
        changes = {"attention_backend": "triton", **changes}
        harness = Harness.make(directory, device, *arguments, **changes)
        assert harness.built.backends["decode"] == mode
        return harness

    return made


def both(make: Any, mode: str, *arguments: Any, **changes: Any) -> tuple[Harness, Harness]:
    return make("eager", *arguments, **changes), make(mode, *arguments, **changes)


def check_record_and_replay(eager: Harness, other: Harness) -> None:
    prompts = random_prompts(LENGTHS)
    recorded = eager.record(prompts, STEPS)
    assert differing_columns(recorded, other.record(prompts, STEPS)) == set()
    replayed = eager.replay(prompts, recorded)
    assert differing_columns(replayed, other.replay(prompts, recorded)) == set()
    if not HAS_CUDA:
        return
    # Once more: graphs that were recorded before, other slots and blocks.
    assert differing_columns(replayed[::-1], other.replay(prompts, recorded)[::-1]) == set()
    assert differing_columns(recorded, replayed) <= {"launch_tokens", "launch_requests"}


def test_record_and_replay_on_the_device(make, checkpoint):
    check_record_and_replay(*both(make, "device", checkpoint()))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["device", "cuda-graph"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_record_and_replay(make, checkpoint, mode, dtype, family):
    check_record_and_replay(*both(make, mode, checkpoint(family), dtype))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changes",
    [
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"fixed_batch": True},
        {"max_num_seqs": 2},
        {"block_size": 2, "num_kv_blocks": 60},
        {"block_size": 2, "num_kv_blocks": 60, "preemption": "recompute"},
    ],
)
def test_in_every_kind_of_cache_and_batch(make, checkpoint, changes):
    check_record_and_replay(*both(make, "cuda-graph", checkpoint(), torch.bfloat16, **changes))


@pytest.mark.parametrize("mode", MODES)
def test_whole_distributions_are_those_of_their_step(make, checkpoint, mode):
    """They are read from the logits, which the next launch overwrites."""
    prompts = random_prompts(LENGTHS)

    def run(harness: Harness):
        requests = [
            harness.request(i, p, ignore_eos=True, max_tokens=STEPS) for i, p in enumerate(prompts)
        ]
        for request in requests:
            request.full_logprobs = np.arange(STEPS, dtype=np.float64)
        return harness.built.engine.run(requests, max_full_logprobs=len(prompts) * STEPS - 2)

    eager, other = both(make, mode, checkpoint())
    assert differing_columns(run(eager), run(other)) == set()


@pytest.mark.parametrize("mode", MODES)
def test_requests_of_all_kinds_take_turns(make, checkpoint, mode):
    """Replayed, greedy and sampled ones: launches that the decode path does not take, between."""
    prompts = random_prompts(LENGTHS)
    eager, other = both(make, mode, checkpoint())
    recorded = eager.record(prompts, STEPS)

    def run(harness: Harness):
        requests = []
        for i, (prompt, output) in enumerate(zip(prompts, recorded, strict=True)):
            params: dict[str, Any] = {"ignore_eos": True, "max_tokens": STEPS + i % 3}
            support = None
            if i % 3 == 0:
                params = {"trace_decode_token_ids": output.token_ids.tolist()}
                support = output.support_token_ids
            elif i % 3 == 1:
                params["temperature"] = 0.8
            requests.append(harness.request(i, prompt, support, **params))
        return harness.run(requests)

    assert differing_columns(run(eager), run(other)) == set()


@pytest.mark.gpu
@pytest.mark.parametrize("moe_backend", ["batched_mm", "grouped_mm"])
def test_experts_that_wait_for_nothing_are_recorded(make, checkpoint, device, moe_backend):
    from tests.tiny import engine_config
    from trace_audit.engine.build import build_engine
    from trace_audit.models.loader import load_model

    outputs = []
    for mode in ("eager", "cuda-graph"):
        make(mode, checkpoint())  # sets the mode
        loaded = load_model(
            checkpoint("qwen3-moe"),
            dtype=torch.bfloat16,
            device=device,
            lm_head_dtype=torch.bfloat16,
            moe_backend=moe_backend,
        )
        config = engine_config(device=device.type, attention_backend="triton")
        harness = Harness.around(loaded, build_engine(loaded, config))
        outputs.append(harness.record(random_prompts(LENGTHS), STEPS))
    assert differing_columns(*outputs) == set()


@pytest.mark.gpu
def test_graphs_are_what_a_gpu_gets_and_eager_what_enforce_eager_asks_for(checkpoint, device):
    for changes, mode in (
        ({"attention_backend": "triton"}, "cuda-graph"),
        ({"attention_backend": "triton", "enforce_eager": True}, "device"),
        ({"attention_backend": "sdpa"}, "eager"),
    ):
        harness = Harness.make(checkpoint(), device, **changes)
        assert harness.built.backends["decode"] == mode
    harness = Harness.make(checkpoint("mixtral"), device, attention_backend="triton")
    assert harness.loaded.experts != "eager" or harness.built.backends["decode"] == "device"


@pytest.mark.parametrize(
    ("num_requests", "rows"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 16), (64, 64)]
)
def test_rows_of_padded_launches(num_requests, rows):
    assert in_buckets(num_requests) == rows


def test_attention_backends_see_launches_of_one_shape(make, checkpoint):
    """So what two of them differ by is what attention computes."""
    prompts = random_prompts(LENGTHS)
    outputs = [
        make("eager", checkpoint(), attention_backend=name).record(prompts, STEPS)
        for name in ("eager", "sdpa")
    ]
    shapes = {"launch_tokens", "launch_requests", "chunk_start", "phase"}
    assert not differing_columns(*outputs) & shapes
