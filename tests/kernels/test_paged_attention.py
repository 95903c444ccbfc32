"""Paged attention kernels against float64 attention over the gathered context."""

from __future__ import annotations

import pytest
import torch

from tests.kv_formats import QUANTIZED, storage
from trace_audit.attention.base import AttentionBatch, LayerSpec
from trace_audit.attention.eager import EagerAttention
from trace_audit.attention.kv_cache import KVCache
from trace_audit.attention.sdpa import SdpaAttention
from trace_audit.attention.triton import TritonAttention
from trace_audit.kernels.attention_tile import AttentionOptions
from trace_audit.kernels.paged_decode import DecodeConfig, paged_decode, split_length

BACKENDS = {"eager": EagerAttention, "sdpa": SdpaAttention, "triton": TritonAttention}


def layer(heads=4, kv_heads=2, dim=16, value_dim=None, window=None, softcap=None) -> LayerSpec:
    return LayerSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        key_dim=dim,
        value_dim=value_dim or dim,
        scale=dim**-0.5,
        window=window,
        softcap=softcap,
    )


def make_case(spec, query_lens, context_lens, block_size, dtype, device, seed=0, stored=None):
    """A cache with scattered blocks, of the dtype or what `kv_cache_dtype` calls `stored`.

    Returns:
        The cache, queries of the dtype, the launch, and each row's keys and values as float64:
        those that the cache holds.
    """
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [-(-c // block_size) for c in context_lens]
    order = torch.randperm(sum(num_blocks) + 3, generator=generator)
    table = torch.zeros(len(query_lens), max(num_blocks), dtype=torch.int32)
    cache_dtype, scaled = storage(stored) if stored else (dtype, False)
    cache = KVCache(
        [spec],
        num_blocks=len(order),
        block_size=block_size,
        dtype=cache_dtype,
        device=device,
        scaled=scaled,
    )
    context = []
    for row, (count, length) in enumerate(zip(num_blocks, context_lens, strict=True)):
        table[row, :count] = order[:count]
        order = order[count:]
        key = torch.randn(length, spec.num_kv_heads, spec.key_dim, generator=generator)
        value = torch.randn(length, spec.num_kv_heads, spec.value_dim, generator=generator)
        key, value = key.to(dtype).to(device), value.to(dtype).to(device)
        positions = torch.arange(length)
        slots = table[row, positions // block_size].long() * block_size + positions % block_size
        cache.write(0, key, value, slots.to(device))
        blocks = table[row, :count].long().to(device)
        sides = (cache.keys[0], cache.values[0])
        context.append([held(side, blocks, dtype)[:length] for side in sides])
    query = torch.randn(sum(query_lens), spec.num_heads, spec.key_dim, generator=generator)
    query = query.to(dtype).to(device)
    batch = AttentionBatch(
        query_lens=torch.tensor(query_lens).numpy(),
        context_lens=torch.tensor(context_lens).numpy(),
        block_table=table.numpy(),
        block_size=block_size,
        kv_slots=torch.zeros(0, dtype=torch.long, device=device),
        device=device,
    )
    return cache, query, batch, context


def held(side, blocks, dtype):
    """The blocks of one side as a model of the dtype sees them, in float64: [tokens, KV, D]."""
    numbers = side.data.float().double()
    if side.scales is not None:
        numbers = numbers * side.scales.double()[..., None]
    return numbers[blocks].flatten(0, 1).to(dtype).double()


def exact(spec, query, query_lens, context):
    out, start = [], 0
    for query_len, (key, value) in zip(query_lens, context, strict=True):
        q = query[start : start + query_len].double().transpose(0, 1)
        group = spec.num_heads // spec.num_kv_heads
        k = key.transpose(0, 1).repeat_interleave(group, 0)
        v = value.transpose(0, 1).repeat_interleave(group, 0)
        scores = q @ k.transpose(1, 2) * spec.scale
        if spec.softcap:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        length = key.shape[0]
        at = torch.arange(length - query_len, length, device=query.device)[:, None]
        to = torch.arange(length, device=query.device)[None]
        hidden = to > at
        if spec.window:
            hidden = hidden | (at - to >= spec.window)
        out.append((scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(0, 1))
        start += query_len
    return torch.cat(out)


SPECS = {
    "grouped": layer(),
    "one-kv-head": layer(heads=9, kv_heads=3, dim=64),
    "multi-head": layer(heads=2, kv_heads=2, dim=24),
    "window": layer(window=5),
    "softcap": layer(softcap=2.0),
    "value-width": layer(dim=24, value_dim=16),
}
# Decode rows first: alone, on both sides of a block and a split, then chunks.
SHAPES = {
    "decode": ([1, 1, 1, 1], [1, 8, 9, 300]),
    "split-edge": ([1, 1, 1], [255, 256, 257]),
    "prefill": ([7, 70], [7, 70]),
    "chunked": ([5, 33], [40, 97]),
    "mixed": ([1, 1, 12], [17, 3, 12]),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spec", SPECS)
def test_float32_attention_against_float64(backend, spec, shape, device):
    spec = SPECS[spec]
    if backend == "sdpa" and spec.softcap is not None:
        pytest.skip("sdpa refuses soft-capping")
    query_lens, context_lens = SHAPES[shape]
    cache, query, batch, context = make_case(
        spec, query_lens, context_lens, 8, torch.float32, device
    )
    attention = BACKENDS[backend]()
    attention.check(spec)
    attention.prepare(batch)
    got = attention.forward(query, cache.keys[0], cache.values[0], spec)
    want = exact(spec, query, query_lens, context)
    assert got.dtype == torch.float32
    assert (got.double() - want).abs().max() < 5e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_attention_within_its_own_rounding(backend, dtype, device):
    spec = SPECS["grouped"]
    query_lens, context_lens = SHAPES["mixed"]
    cache, query, batch, context = make_case(spec, query_lens, context_lens, 8, dtype, device)
    attention = BACKENDS[backend]()
    attention.prepare(batch)
    got = attention.forward(query, cache.keys[0], cache.values[0], spec)
    want = exact(spec, query, query_lens, context)
    assert got.dtype == dtype
    # Outputs are at most 4 or so; scores, weights and outputs each round once or twice.
    assert (got.double() - want).abs().max() < 16 * torch.finfo(dtype).eps


# Launches that write to the cache what they attend to: chunks on both sides of 256 tokens, alone
# and after others, and decode rows on both sides of a split.
QUANTIZED_SHAPES = {
    "255": ([255], [255]),
    "256": ([256], [256]),
    "257": ([257], [257]),
    "second-chunk": ([255, 256], [300, 513]),
    "split-edge": ([1, 1, 1], [255, 256, 257]),
    "mixed": ([1, 1, 12], [17, 3, 12]),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", QUANTIZED_SHAPES)
@pytest.mark.parametrize("stored", [*QUANTIZED, "bfloat16", "float16"])
def test_float32_attention_to_other_stored_numbers_against_float64(backend, shape, stored, device):
    spec = SPECS["grouped"]
    query_lens, context_lens = QUANTIZED_SHAPES[shape]
    cache, query, batch, context = make_case(
        spec, query_lens, context_lens, 8, torch.float32, device, stored=stored
    )
    attention = BACKENDS[backend]()
    attention.prepare(batch)
    got = attention.forward(query, cache.keys[0], cache.values[0], spec)
    assert got.dtype == torch.float32
    assert (got.double() - exact(spec, query, query_lens, context)).abs().max() < 5e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("stored", ["fp8_e4m3", "int8"])
def test_every_kind_of_layer_attends_to_stored_numbers(backend, spec, stored, device):
    spec = SPECS[spec]
    if backend == "sdpa" and spec.softcap is not None:
        pytest.skip("sdpa refuses soft-capping")
    query_lens, context_lens = [1, 1, 5, 33], [9, 300, 40, 33]
    cache, query, batch, context = make_case(
        spec, query_lens, context_lens, 8, torch.float32, device, stored=stored
    )
    attention = BACKENDS[backend]()
    attention.prepare(batch)
    got = attention.forward(query, cache.keys[0], cache.values[0], spec)
    assert (got.double() - exact(spec, query, query_lens, context)).abs().max() < 5e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", QUANTIZED)
def test_half_precision_attention_to_stored_numbers(backend, dtype, stored, device):
    spec = SPECS["grouped"]
    query_lens, context_lens = QUANTIZED_SHAPES["mixed"]
    cache, query, batch, context = make_case(
        spec, query_lens, context_lens, 8, dtype, device, stored=stored
    )
    attention = BACKENDS[backend]()
    attention.prepare(batch)
    got = attention.forward(query, cache.keys[0], cache.values[0], spec)
    assert got.dtype == dtype
    worst = (got.double() - exact(spec, query, query_lens, context)).abs().max()
    assert worst < 16 * torch.finfo(dtype).eps  # as with an unquantized cache


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_float32_cache_holds_half_precision_as_it_is(backend, dtype, device):
    spec = SPECS["grouped"]
    outputs = []
    for stored in (None, "float32"):
        cache, query, batch, _ = make_case(
            spec, [1, 1, 12], [17, 3, 12], 8, dtype, device, stored=stored
        )
        attention = BACKENDS[backend]()
        attention.prepare(batch)
        outputs.append(attention.forward(query, cache.keys[0], cache.values[0], spec))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stored", QUANTIZED)
def test_a_key_that_is_not_finite_reaches_the_row_that_sees_it(backend, stored, device):
    spec = SPECS["grouped"]
    cache, query, batch, _ = make_case(
        spec, [1, 1], [9, 20], 8, torch.float32, device, stored=stored
    )
    block = int(batch.block_table[1, 0])
    key = torch.full((1, 2, 16), float("inf"), device=device)
    cache.write(0, key, torch.ones_like(key), torch.tensor([block * 8 + 3], device=device))
    attention = BACKENDS[backend]()
    attention.prepare(batch)
    got = attention.forward(query, cache.keys[0], cache.values[0], spec)
    assert got[0].isfinite().all()
    assert not got[1].isfinite().any()


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_a_row_does_not_depend_on_its_neighbours(backend, device):
    spec = SPECS["window"]
    lens = [300, 9, 40]
    cache, query, batch, _ = make_case(spec, [1, 1, 1], lens, 8, torch.float32, device)
    attention = BACKENDS[backend]()
    attention.prepare(batch)
    together = attention.forward(query, cache.keys[0], cache.values[0], spec)
    for row in range(3):
        alone = AttentionBatch(
            query_lens=batch.query_lens[row : row + 1],
            context_lens=batch.context_lens[row : row + 1],
            block_table=batch.block_table[row : row + 1],
            block_size=8,
            kv_slots=batch.kv_slots,
            device=device,
        )
        attention.prepare(alone)
        got = attention.forward(query[row : row + 1], cache.keys[0], cache.values[0], spec)
        assert torch.equal(got, together[row : row + 1])


def decoded(spec, lens, device, *, rows=slice(None), dtype):
    """Decode some rows of one case by a configuration of many short parts."""
    cache, query, batch, context = make_case(spec, [1] * len(lens), lens, 8, dtype, device)
    tables = (torch.from_numpy(t).int().to(device) for t in (batch.block_table, batch.context_lens))
    table, context_lens = (t[rows].contiguous() for t in tables)
    options = AttentionOptions(scale=spec.scale, window=spec.window, softcap=spec.softcap)
    config = DecodeConfig(split=16, tile=16)
    got = paged_decode(
        query[rows], cache.keys[0], cache.values[0], table, context_lens, int(context_lens.max()),
        options, config,
    )  # fmt: skip
    return got, exact(spec, query, [1] * len(lens), context)[rows]


@pytest.mark.parametrize("spec", ["grouped", "window"])
def test_parts_are_joined_and_grow_with_a_context_that_has_too_many(spec, device):
    """1024 tokens are 64 parts of 16, one more token makes them 33 of 32, and 2,060 are of 64."""
    lens = [1, 16, 17, 1024, 1025, 2060]
    got, want = decoded(SPECS[spec], lens, device, dtype=torch.float32)
    assert (got.double() - want).abs().max() < 5e-6
    alone, _ = decoded(SPECS[spec], lens, device, rows=slice(4, 5), dtype=torch.float32)
    assert torch.equal(alone, got[4:5])


def test_long_parts_are_for_launches_that_may_have_many_rows():
    assert split_length(63, 8) == 256
    assert split_length(64, 8) == 1024
    assert split_length(64, 3) == 256
    assert split_length(256, 2) == 1024


@pytest.mark.parametrize("split", [256, 1024])
def test_a_backend_attends_in_parts_of_its_own_length(split, device, monkeypatch):
    spec = SPECS["grouped"]
    cache, query, batch, context = make_case(spec, [1, 1], [9, 1100], 8, torch.float32, device)
    used = []

    def keep(*arguments):
        used.append(arguments[-1].split)
        return paged_decode(*arguments)

    monkeypatch.setattr("trace_audit.attention.triton.paged_decode", keep)
    attention = TritonAttention(split=split)
    attention.prepare(batch)
    got = attention.forward(query, cache.keys[0], cache.values[0], spec)
    assert used == [split]
    assert (got.double() - exact(spec, query, [1, 1], context)).abs().max() < 5e-6


def test_sdpa_refuses_soft_capping():
    from trace_audit.errors import ModelError

    with pytest.raises(ModelError, match="soft-cap"):
        SdpaAttention().check(SPECS["softcap"])
