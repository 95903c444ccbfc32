"""Compiled decoder layers: one graph for all of a kind, the same model, the same bytes twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch._inductor.config
from torch._dynamo.utils import counters

import trace_audit.models.loader as loader
from tests.tiny import Harness, differing_columns, engine_config, random_prompts
from trace_audit.engine.build import build_engine
from trace_audit.errors import ConfigError, ModelError
from trace_audit.model_check import check_model
from trace_audit.models.compiled import COMPILED, check_compiler
from trace_audit.models.loader import load_model

pytestmark = pytest.mark.timeout(900)  # compiling takes a minute where nothing is cached


@pytest.fixture(autouse=True)
def _no_graphs_of_other_engines() -> None:
    """A run has a process and one engine; here many engines share what a process may compile."""
    torch._dynamo.reset()


PROMPTS = random_prompts([3, 20, 9, 41, 5, 11, 2])


def harness(directory, device, *, compiled: bool, dtype=torch.float32, **changes: Any) -> Harness:
    name = str(dtype).removeprefix("torch.")
    loaded = load_model(
        directory,
        dtype=dtype,
        device=device,
        lm_head_dtype=dtype,
        compiled=compiled,
        quantization=changes.pop("quantization", "none"),
        moe_backend=changes.pop("moe_backend", "auto"),
    )
    config = engine_config(device=device.type, dtype=name, lm_head_dtype=name, **changes)
    return Harness.around(loaded, build_engine(loaded, config))


def largest_difference(first, other) -> float:
    return max(
        float(np.abs(a.logprob - b.logprob).max()) for a, b in zip(first, other, strict=True)
    )


def test_a_compiled_model_is_the_same_model_in_one_graph_for_every_batch(checkpoint, device):
    eager = harness(checkpoint(), device, compiled=False)
    recorded = eager.record(PROMPTS, 10)
    assert eager.built.backends["compile"] == "none"
    counters.clear()
    compiled = harness(checkpoint(), device, compiled=True)
    assert compiled.built.backends["compile"] == COMPILED
    # One graph for a single token and one for any other number, of four layers.
    assert counters["stats"]["unique_graphs"] == 2
    replayed = compiled.replay(PROMPTS, recorded)
    assert len(set(compiled.launches)) > 3
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    assert 0 < largest_difference(recorded, replayed) < 5e-5
    # transformers' own forward over the same weights is not compiled.
    checked = check_model(
        compiled.loaded, PROMPTS[0], recorded[0].token_ids.tolist(), replayed[0].logprob
    )
    assert checked["max_abs_delta_logprob"] < 5e-5
    assert counters["stats"]["unique_graphs"] == 2
    again = harness(checkpoint(), device, compiled=True).replay(PROMPTS, recorded)
    for a, b in zip(replayed, again, strict=True):
        assert a.logprob.tobytes() == b.logprob.tobytes()
        assert (a.logits_hash == b.logits_hash).all()
    # Another engine's attention is another engine's cache.
    assert largest_difference(recorded, eager.replay(PROMPTS, recorded)) == 0


def test_layers_that_cannot_be_a_graph_are_refused(checkpoint, device):
    with pytest.raises(ModelError, match="Qwen3MoeForCausalLM cannot be compiled") as caught:
        harness(checkpoint("qwen3-moe"), device, compiled=True, moe_backend="eager")
    assert "batched_mm" in str(caught.value.hint)


@pytest.mark.slow
def test_compiled_layers_tell_their_experts_at_no_bit(checkpoint, device, monkeypatch):
    how = {"compiled": True, "moe_backend": "batched_mm", "dtype": torch.bfloat16}
    recorded = harness(checkpoint("qwen3-moe"), device, compiled=False).record(PROMPTS, 6)
    counters.clear()
    looked = harness(checkpoint("qwen3-moe"), device, **how)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs <= 4  # a dense layer and one with experts, for a token and for more
    replayed = looked.replay(PROMPTS, recorded)
    assert len(set(looked.launches)) > 3
    assert counters["stats"]["unique_graphs"] == graphs
    calls = [(a.expert_ids != b.expert_ids).any(2) for a, b in zip(recorded, replayed, strict=True)]
    assert np.concatenate(calls).mean() < 0.1
    torch._dynamo.reset()
    monkeypatch.setattr(loader, "capture_choices", lambda model, routing: None)
    blind = harness(checkpoint("qwen3-moe"), device, **how).replay(PROMPTS, recorded)
    assert differing_columns(replayed, blind) == {"expert_ids"}


def test_a_cpu_without_a_compiler_is_refused():
    check_compiler("cpu")
    missing = torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)})
    with missing, pytest.raises(ConfigError, match=r"a C\+\+ compiler on a CPU") as caught:
        check_compiler("cpu")
    assert "g++" in str(caught.value.hint)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "gemma3", "qwen3", "phi3", "olmo2", "stablelm"])
def test_layers_of_several_kinds_are_compiled_once_a_kind(checkpoint, device, family):
    recorded = harness(checkpoint(family), device, compiled=False).record(PROMPTS, 6)
    counters.clear()
    compiled = harness(checkpoint(family), device, compiled=True)
    kinds = 2 if family.startswith("gemma") else 1
    assert counters["stats"]["unique_graphs"] <= 2 * kinds
    assert largest_difference(recorded, compiled.replay(PROMPTS, recorded)) < 5e-5
    assert counters["stats"]["unique_graphs"] <= 2 * kinds


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"path": "prefill"},
        {"fixed_batch": True},
        {"quantization": "fp8"},
        {"quantization": "int4_weight_only"},
        {"kv_cache_dtype": "int8", "attention_backend": "sdpa"},
    ],
    ids=str,
)
def test_compiled_layers_go_with_the_other_axes(checkpoint, device, changes):
    recorded = harness(checkpoint(), device, compiled=False).record(PROMPTS, 6)
    eager, compiled = (
        harness(checkpoint(), device, compiled=compiled, **changes).replay(PROMPTS, recorded)
        for compiled in (False, True)
    )
    # A last bit can move what is rounded to 8 bits by one of its steps.
    coarse = changes.get("quantization") == "fp8" or "kv_cache_dtype" in changes
    assert largest_difference(eager, compiled) < (0.2 if coarse else 5e-5)
