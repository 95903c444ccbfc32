"""Fused layers compute the model, and what cannot be fused is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tiny import Harness, differing_columns, engine_config, random_prompts
from trace_audit.config import EngineConfig, Hardware, RunConfig, resolve
from trace_audit.engine.build import build_engine
from trace_audit.errors import ConfigError
from trace_audit.kernels import fused as fused_kernels
from trace_audit.models import fused as fused_layers
from trace_audit.models import loader
from trace_audit.models.loader import load_model

PROMPTS = [3, 9, 31]


def harness(directory: Any, device: torch.device, dtype: torch.dtype, *, fused: bool, **changes):
    loaded = load_model(directory, dtype=dtype, device=device, lm_head_dtype=dtype, fused=fused)
    config = engine_config(device=device.type, **changes)
    return Harness.around(loaded, build_engine(loaded, config))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_fused_layers_are_the_model(checkpoint, device, family, backend):
    """In float32 only the order of sums is another one."""
    changes = {"attention_backend": backend}
    plain, fused = (
        harness(checkpoint(family), device, torch.float32, fused=fused, **changes)
        for fused in (False, True)
    )
    assert (plain.built.backends["layers"], fused.built.backends["layers"]) == (
        "transformers",
        "fused, triton" if device.type == "cuda" else "fused, reference",
    )
    prompts = random_prompts(PROMPTS)
    recorded = plain.record(prompts, 6)
    replayed = fused.replay(prompts, recorded)
    for a, b in zip(recorded, replayed, strict=True):
        assert abs(a.logprob - b.logprob).max() < 2e-5


def test_in_bfloat16_fused_layers_are_nearer_to_float32(checkpoint, device):
    """Fewer roundings; the mean over all tokens, not every token."""
    prompts = random_prompts([3, 9, 31, 17])
    exact = harness(checkpoint("qwen3"), device, torch.float32, fused=False)
    recorded = exact.record(prompts, 12)
    errors = []
    for fused in (False, True):
        other = harness(checkpoint("qwen3"), device, torch.bfloat16, fused=fused)
        outputs = other.replay(prompts, recorded)
        deltas = [abs(a.logprob - b.logprob) for a, b in zip(recorded, outputs, strict=True)]
        errors.append(sum(map(sum, deltas)) / sum(map(len, deltas)))
    assert 0 < errors[1] < errors[0]


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_of_fused_layers_is_bit_equal(checkpoint, device, family, dtype):
    prompts = random_prompts(PROMPTS)
    outputs = []
    for eager in (True, False):
        one = harness(
            checkpoint(family),
            device,
            dtype,
            fused=True,
            attention_backend="triton",
            enforce_eager=eager,
        )
        assert one.built.backends["decode"] == ("device" if eager else "cuda-graph")
        outputs.append(one.record(prompts, 8))
    assert differing_columns(*outputs) == set()


@pytest.mark.parametrize(("family", "rows"), [("llama", 1), ("qwen2", 1), ("qwen3", 2)])
def test_fused_products_of_few_rows_are_the_model(checkpoint, device, monkeypatch, family, rows):
    """The kernels themselves; on a CPU they are interpreted, which only a test asks for."""
    monkeypatch.setattr(fused_layers, "_kernels", lambda device: fused_kernels)
    # These kernels read weights as they are on a GPU, where none are packed.
    monkeypatch.setattr(loader, "can_pack", lambda *_, **__: False)
    counted = []
    product = fused_layers.few_rows_linear

    def counting(x: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        counted.append(len(x))
        return product(x, *arguments, **options)

    monkeypatch.setattr(fused_layers, "few_rows_linear", counting)
    prompts = random_prompts([5, 9][:rows])
    plain, fused = (
        harness(checkpoint(family), device, torch.float32, fused=fused) for fused in (False, True)
    )
    recorded = plain.record(prompts, 4)
    for a, b in zip(recorded, fused.replay(prompts, recorded), strict=True):
        assert abs(a.logprob - b.logprob).max() < 2e-5
    # Four products a layer, in each of the three launches after the prompts' own.
    assert counted.count(rows) >= 3 * 4 * len(fused.loaded.layers)


def test_the_prefill_path_runs_fused_layers_too(checkpoint, device):
    prompts = random_prompts(PROMPTS)
    decode = harness(checkpoint("qwen3"), device, torch.float32, fused=True)
    recorded = decode.record(prompts, 6)
    prefill = harness(checkpoint("qwen3"), device, torch.float32, fused=True, path="prefill")
    for a, b in zip(recorded, prefill.replay(prompts, recorded), strict=True):
        assert abs(a.logprob - b.logprob).max() < 2e-5


@pytest.mark.parametrize("family", ["gemma2", "qwen3-moe"])
def test_layers_of_another_make_are_refused(checkpoint, device, family):
    with pytest.raises(ConfigError, match="this model is of type"):
        harness(checkpoint(family), device, torch.float32, fused=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compile": True}, "compile = true changes"),
        ({"quantization": "int8_weight_only"}, "int8_weight_only"),
    ],
)
def test_two_changes_of_the_layers_are_refused(changes, message):
    hardware = Hardware(cuda_available=False, cuda_device_name=None, cpu_count=2)
    config = RunConfig(name="x", engine=EngineConfig(device="cpu", fused=True, **changes))
    with pytest.raises(ConfigError, match=message):
        resolve(config, hardware=hardware, max_sequence_len=16)


def test_on_a_cpu_no_fused_kernel_is_interpreted(checkpoint, monkeypatch):
    """It would take a hundred times as long, as a run on a CPU has Triton interpreted."""
    from trace_audit.kernels import fused

    def refused(*arguments: Any) -> None:
        raise AssertionError("a kernel ran")

    for name in ("add_rms_norm", "norm_and_rotate", "silu_and_multiply"):
        monkeypatch.setattr(fused, name, refused)
    one = harness(checkpoint(), torch.device("cpu"), torch.float32, fused=True)
    assert one.built.backends["layers"] == "fused, reference"
    one.record(random_prompts(PROMPTS), 2)
