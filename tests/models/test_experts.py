"""A mixture of experts computed by each of transformers' implementations."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.parallel.emulated import emulated
from tests.tiny import Harness, engine_config, random_prompts, tiny_config
from trace_audit.engine.build import build_engine
from trace_audit.errors import ConfigError
from trace_audit.models.conformance import TOLERANCE, check_architecture
from trace_audit.models.experts import apply_moe_backend
from trace_audit.models.loader import load_model
from trace_audit.models.split import load_split_model
from trace_audit.parallel.lockstep import Lockstep
from trace_audit.parallel.world import lockstep_world

BACKENDS = ("eager", "batched_mm", "grouped_mm")
PROMPTS = random_prompts([3, 20])


def load(directory, device, moe_backend="auto", dtype=torch.float32, loader=load_model):
    return loader(
        directory, dtype=dtype, device=device, lm_head_dtype=dtype, moe_backend=moe_backend
    )


def harness(loaded, device, **world) -> Harness:
    config = engine_config(device=device.type)
    return Harness.around(loaded, build_engine(loaded, config, **world))


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
def test_every_implementation_computes_the_same_model(checkpoint, device, family):
    logprobs = {}
    for backend in (*BACKENDS, "auto"):
        run = harness(load(checkpoint(family), device, backend), device)
        named = run.built.backends["experts"]
        assert named == backend if backend != "auto" else named in BACKENDS
        logprobs[backend] = np.concatenate([o.logprob for o in run.record(PROMPTS, 6)])
    for backend in BACKENDS:
        assert np.abs(logprobs[backend] - logprobs["eager"]).max() < 1e-4
    assert (logprobs["auto"] == logprobs[named]).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_architecture_is_admitted_as_it_is_going_to_run(backend):
    config = tiny_config("qwen3-moe")
    apply_moe_backend(config, backend)
    assert check_architecture(config) < TOLERANCE / 10
    assert config._experts_implementation == backend


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensor_parallel_ranks_compute_their_share_so(checkpoint, device, backend):
    directory = checkpoint("qwen3-moe")
    whole = harness(load(directory, device, backend), device).record(PROMPTS, 6)
    with Lockstep(2) as lockstep:
        worlds = [lockstep_world(emulated(2), lockstep, rank) for rank in range(2)]

        def engine(rank: int) -> Harness:
            loader = partial(load_split_model, world=worlds[rank])
            return harness(
                load(directory, device, backend, loader=loader), device, world=worlds[rank]
            )

        lockstep.start(lambda rank: engine(rank).built.engine.follow())
        split = engine(0)
        assert split.built.backends["experts"] == backend
        outputs = split.record(PROMPTS, 6)
        split.built.engine.close()
    for a, b in zip(whole, outputs, strict=True):
        assert np.abs(a.logprob - b.logprob).max() < 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_without_experts_has_nothing_to_choose(checkpoint, device, backend):
    with pytest.raises(ConfigError, match="LlamaForCausalLM has none") as caught:
        load(checkpoint(), device, backend)
    assert caught.value.hint == 'leave moe_backend at "auto"'
    assert load(checkpoint(), device).experts == "none"


@pytest.mark.parametrize(("width", "dtype"), [(62, torch.float32), (60, torch.bfloat16)])
def test_grouped_mm_refuses_widths_that_are_no_multiple_of_16_bytes(tmp_path, device, width, dtype):
    config = tiny_config("qwen3-moe")
    config.moe_intermediate_size = width
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="multiples of 16 bytes") as caught:
        load(tmp_path, device, "grouped_mm", dtype)
    assert caught.value.hint is not None
    assert "batched_mm" in caught.value.hint
    assert load(tmp_path, device, "batched_mm", dtype).experts == "batched_mm"
