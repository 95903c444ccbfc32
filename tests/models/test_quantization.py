"""Weights of 8 and 4 bits: how they round, what they leave alone, what cannot be quantized."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import GPT2Config

from tests.tiny import Harness, engine_config, random_prompts, tiny_config
from trace_audit.engine.build import build_engine
from trace_audit.errors import ConfigError
from trace_audit.models.loader import load_model
from trace_audit.models.quantization import (
    Fp8Linear,
    fp8_rows,
    int4_group,
    int4_rounded,
    int8_rounded,
)
from trace_audit.models.quantization_check import check_quantization

QUANTIZATIONS = ("int8_weight_only", "int4_weight_only", "fp8")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PROMPTS = random_prompts([3, 20, 9])


def weights(dtype: torch.dtype, rows: int = 7, width: int = 256) -> torch.Tensor:
    """Rows of different sizes, one of zeros, one with an outlier."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(rows, width, generator=generator) * torch.logspace(-3, 1, rows)[:, None]
    values[2] = 0
    values[3, 5] = -60.0
    return values.to(dtype)


def nearest(row: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Distance of every number to the nearest of a sorted grid, by looking at all of them."""
    return np.abs(row[:, None] - grid[None, :]).min(1)


def load(directory, device, quantization="none", dtype=torch.float32, **changes):
    return load_model(
        directory, dtype=dtype, device=device, lm_head_dtype=dtype, quantization=quantization,
        **changes,
    )  # fmt: skip


def outputs(loaded, **changes):
    harness = Harness.around(loaded, build_engine(loaded, engine_config(**changes)))
    return harness, harness.record(PROMPTS, 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rounded", "num_bits", "group"), [(int8_rounded, 8, 256), (int4_rounded, 4, 128)]
)
def test_every_weight_is_the_nearest_of_its_groups_numbers(dtype, rounded, num_bits, group):
    given = weights(dtype)
    got = rounded(given)
    assert got.dtype == dtype
    half = 2 ** (num_bits - 1)
    epsilon = torch.finfo(dtype).eps
    for row, new in zip(given.double().view(-1, group), got.double().view(-1, group), strict=True):
        row, new = row.numpy(), new.numpy()
        scale = np.abs(row).max() / (half - 0.5)
        grid = np.arange(-half, half) * scale
        # One rounding to the format, one to the dtype.
        assert nearest(new, grid).max() <= epsilon * np.abs(grid).max()
        slack = 2 * epsilon * np.abs(row).max()
        assert (np.abs(new - row) <= nearest(row, grid) + slack).all()


def test_8_bit_integers_are_those_of_torchao():
    torchao = pytest.importorskip("torchao.quantization")
    linear = torch.nn.Linear(256, 7, bias=False)
    given = weights(torch.float32)
    linear.weight.data = given.clone()
    torchao.quantize_(linear, torchao.Int8WeightOnlyConfig())
    assert torch.equal(linear.weight.dequantize(), int8_rounded(given))


def test_int4_groups_are_the_largest_that_divide_a_row():
    assert [int4_group(width) for width in (4096, 576, 96, 32)] == [128, 64, 32, 32]
    with pytest.raises(ConfigError, match="multiple of 32, and this model has one of 144"):
        int4_group(144)
    given = torch.ones(1, 64)
    given[0, 0] = 100.0
    wide = torch.cat([given, torch.ones(1, 64)], 1)
    assert (int4_rounded(wide)[0, 64:] == 0).all()  # one group of 128: the outlier decides
    narrow = int4_rounded(torch.cat([wide, given], 1))  # groups of 64
    assert (narrow[0, 64:128] > 0.9).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_rows_are_the_nearest_8_bit_floats_of_their_scale(dtype):
    given = weights(dtype)
    quantized, scale = fp8_rows(given)
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    grid = every[every.isfinite()].unique().numpy()
    for row, new, factor in zip(given.double(), quantized.double(), scale.double(), strict=True):
        if not row.any():
            assert not new.any()
            continue
        assert float(factor) == pytest.approx(float(row.abs().max()) / 448, rel=1e-6)
        values = row.numpy() / float(factor)
        distance = np.abs(new.numpy() - values)
        assert (distance <= nearest(values, grid) + 448 * 1e-6).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_an_fp8_product_is_that_of_its_8_bit_numbers(dtype, bias):
    linear = torch.nn.Linear(256, 7, bias=bias)
    linear.weight.data = weights(torch.float32)
    linear = linear.to(dtype)
    x = torch.randn(2, 5, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[0, 0] = 0
    got = Fp8Linear(linear, scaled_mm=False)(x)
    assert got.dtype == dtype
    rows, row_scale = fp8_rows(x.view(10, 256))
    columns, column_scale = fp8_rows(linear.weight.detach())
    exact = rows.double() @ columns.double().T * row_scale.double() * column_scale.double().T
    if bias:
        exact += linear.bias.detach().double()
    size = (rows.double() * row_scale).abs() @ (columns.double() * column_scale).abs().T
    bound = torch.finfo(dtype).eps * exact.abs() + 256 * 2**-24 * size + 1e-7
    assert ((got.double().view(10, 7) - exact).abs() <= bound).all()


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("family", ["llama-tied", "phi3"])
def test_all_linear_layers_but_the_head_are_quantized(checkpoint, quantization, family):
    device = torch.device("cpu")
    plain = load(checkpoint(family), device).model
    loaded = load(checkpoint(family), device, quantization)
    assert loaded.quantized.name == quantization
    assert loaded.linear == ("fp8-float32" if quantization == "fp8" else "torch")
    for part in ("get_input_embeddings", "get_output_embeddings"):
        ours, theirs = (getattr(model, part)().weight for model in (loaded.model, plain))
        assert torch.equal(ours, theirs)
    changed = 0
    for name, module in plain.get_decoder().named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        ours = loaded.model.get_decoder().get_submodule(name)
        changed += 1
        if quantization == "fp8":
            assert torch.equal(ours.quantized, fp8_rows(module.weight)[0].float())
        else:
            rounded = {"int8_weight_only": int8_rounded, "int4_weight_only": int4_rounded}
            assert torch.equal(ours.weight, rounded[quantization](module.weight))
    assert changed == 4 * (4 if family == "phi3" else 7)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_coarser_numbers_are_further_from_the_plain_model(checkpoint, device, quantization):
    _, plain = outputs(load(checkpoint(), device), device=device.type)
    harness, first = outputs(load(checkpoint(), device, quantization), device=device.type)
    assert harness.built.backends["quantization"] == quantization
    _, again = outputs(load(checkpoint(), device, quantization), device=device.type)
    for a, b in zip(first, again, strict=True):
        assert a.logprob.tobytes() == b.logprob.tobytes()
    # At the first step all of them have the same prompt.
    moved = max(abs(a.logsumexp[0] - b.logsumexp[0]) for a, b in zip(plain, first, strict=True))
    low, high = {"int8_weight_only": (1e-4, 0.1), "fp8": (1e-3, 1.0)}.get(quantization, (1e-2, 3.0))
    assert low < moved < high


def test_scales_are_told_where_there_are_groups(checkpoint):
    cpu = torch.device("cpu")
    assert load(checkpoint(), cpu).quantized.scales == "none"
    assert load(checkpoint(), cpu, "fp8").quantized.scales == "one a row"
    told = load(checkpoint(), cpu, "int4_weight_only").quantized.scales
    assert told == "one for 32 or 64 weights of a row"  # the tiny model is 64 and 96 wide


@pytest.mark.parametrize(
    ("quantization", "rounded"),
    [("int8_weight_only", int8_rounded), ("int4_weight_only", int4_rounded)],
)
def test_bfloat16_layers_are_packed_with_their_rounded_weights(checkpoint, quantization, rounded):
    cpu = torch.device("cpu")
    plain = load(checkpoint(), cpu)
    loaded = load(checkpoint(), cpu, quantization, dtype=torch.bfloat16)
    assert loaded.linear == load(checkpoint(), cpu, dtype=torch.bfloat16).linear
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for name in ("q_proj", "k_proj", "v_proj"):
        layer, other = (m.model.get_decoder().layers[0].self_attn for m in (loaded, plain))
        weight = rounded(getattr(other, name).weight.detach().to(torch.bfloat16))
        wanted = torch.nn.functional.linear(x, weight)
        with torch.inference_mode():
            got = getattr(layer, name)(x)
        assert (got - wanted).abs().max() <= torch.finfo(torch.bfloat16).eps * wanted.abs().max()


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_models_with_other_matrices_are_refused_before_their_weights_are_read(quantization):
    with pytest.raises(ConfigError, match=r"gate_up_proj belongs to a Qwen3MoeExperts"):
        check_quantization(tiny_config("qwen3-moe"), quantization)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64)
    with pytest.raises(ConfigError, match=r"attn\.c_attn\.weight belongs to a Conv1D"):
        check_quantization(config, quantization)
    check_quantization(tiny_config("llama"), quantization)
    check_quantization(tiny_config("qwen3-moe"), "none")


def test_widths_without_a_group_are_refused_before_the_weights_are_read():
    with pytest.raises(ConfigError, match="multiple of 32") as caught:
        check_quantization(tiny_config("llama-9h"), "int4_weight_only")
    assert "int8_weight_only" in str(caught.value.hint)
    check_quantization(tiny_config("llama-9h"), "fp8")


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 33])
def test_tensor_cores_multiply_the_same_8_bit_numbers(device, bias, num_tokens):
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(256, 64, bias=bias)
    linear.weight.data = torch.randn(64, 256, generator=generator)
    linear = linear.to(torch.bfloat16).to(device)
    x = torch.randn(num_tokens, 256, generator=generator).to(torch.bfloat16).to(device)
    ours, reference = (Fp8Linear(linear, scaled_mm=fast) for fast in (True, False))
    assert torch.equal(ours.quantized.float(), reference.quantized)
    got, wanted = ours(x), reference(x)
    assert got.dtype == torch.bfloat16
    # The tensor cores keep fewer bits of a sum than float32 has.
    assert (got - wanted).abs().max() <= 0.02 * wanted.abs().max()
    assert torch.equal(got, ours(x))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_rounds_as_a_cpu_does(device, dtype):
    given = weights(dtype)
    for rounded in (int8_rounded, int4_rounded):
        assert torch.equal(rounded(given), rounded(given.to(device)).cpu())
    ours, theirs = fp8_rows(given), fp8_rows(given.to(device))
    assert torch.equal(ours[0].float(), theirs[0].float().cpu())
    assert torch.equal(ours[1], theirs[1].cpu())


@pytest.mark.gpu
def test_a_gpu_runs_bfloat16_fp8_on_its_tensor_cores(checkpoint, device):
    loaded = load(checkpoint(), device, "fp8", dtype=torch.bfloat16)
    assert loaded.linear == "fp8-scaled_mm"
    changes = {"device": "cuda", "dtype": "bfloat16", "lm_head_dtype": "bfloat16"}
    _, first = outputs(loaded, **changes)
    _, again = outputs(load(checkpoint(), device, "fp8", dtype=torch.bfloat16), **changes)
    for a, b in zip(first, again, strict=True):
        assert a.logprob.tobytes() == b.logprob.tobytes()
