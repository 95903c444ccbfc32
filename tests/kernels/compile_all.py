"""Compiles every Triton kernel for an NVIDIA GPU, on any machine.

`python -m tests.kernels.compile_all`. The interpreter runs code that a compiler refuses. Kernels
are called as in a run, on tensors of a CPU, and a driver that has no device stands in for the GPU:
everything but the launch happens. Prints the names of the kernels that were compiled.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from trace_audit.kernels import (
    attention_tile,
    cached_heads,
    few_rows,
    fused,
    kv_cache,
    overlap,
    paged_decode,
    paged_prefill,
    row_sum,
    runtime,
    trace_replay,
)
from trace_audit.kernels.statistics import TRITON

TARGET = GPUTarget("cuda", 90, 32)
COMPILED: set[str] = set()


def main() -> None:
    """Compile, and print what was."""
    assert not runtime.is_interpreted()
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: TARGET,
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
        )
    )
    JITFunction.__getitem__ = _compiling  # type: ignore[method-assign, assignment]
    overlap._overlaps = lambda device: True
    trace_replay.can_run_triton = lambda device: True  # type: ignore[attr-defined]
    token_rows()
    statistics()
    between_products()
    attention()
    print("\n".join(sorted(COMPILED)))


def _compiling(kernel: JITFunction, grid: tuple[int, ...]):  # type: ignore[no-untyped-def]
    def compile_only(*args: object, **kwargs: object) -> None:
        compiled = kernel.run(*args, grid=grid, warmup=True, **kwargs)
        name = kernel.fn.__name__
        multiplies = "arith.mulf" in compiled.asm["ttir"]
        assert not (multiplies and compiled.metadata.enable_fp_fusion), (
            f"{name} is not EACH_ROUNDED"
        )
        COMPILED.add(name)

    return compile_only


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def token_rows() -> None:
    rows, lengths = ints(4, 64), ints(4)
    tokens = ints(3, dtype=torch.int64)
    trace_replay.apply_trace_tokens(tokens, ints(3), rows, lengths, lengths, lengths)
    trace_replay.apply_trace_tokens_to_verified(
        ints(3, 5, dtype=torch.int64), ints(3), ints(15), ints(4), ints(3), rows, lengths, lengths,
        lengths,
    )  # fmt: skip
    trace_replay.append_tokens(rows, lengths, ints(3), tokens)
    trace_replay.scatter_values(rows, tokens, ints(3))


def statistics() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits = torch.zeros(2, 1000, dtype=dtype)
        tokens = ints(2, dtype=torch.int64)
        partials = TRITON.vocabulary_partials(logits, ints(1000, dtype=torch.int64))
        counts = TRITON.token_counts(logits, tokens)
        top, support = ints(2, 5), ints(2, 24)
        for excluded in (support[:, :20], ints(2, 1, dtype=torch.int64)):
            tail = TRITON.chunk_masses(logits, partials, excluded)
        TRITON.row_statistics(logits, partials, counts, tail, tokens, top, support)
        for k in (1, 5, 20):
            TRITON.top_ids(logits, partials.maximum, k)
    for dtype in (torch.float32, torch.float64):
        row_sum.row_sum_in_tiles(torch.zeros(2, 3, 1500, dtype=dtype))


def between_products() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        hidden, weight = torch.zeros(2, 576, dtype=dtype), torch.zeros(576, dtype=dtype)
        fused.add_rms_norm(hidden, None, weight, 1e-5)
        fused.add_rms_norm(hidden, hidden.clone(), weight, 1e-5)
        matrix, bias = torch.zeros(1152, 576, dtype=dtype), torch.zeros(1152, dtype=dtype)
        few_rows.few_rows_linear(hidden, matrix, bias)
        for residual in (None, hidden.clone()):
            norm = few_rows.Norm(residual, weight, 1e-5)
            few_rows.few_rows_linear(hidden, matrix, None, norm=norm)
            few_rows.few_rows_linear(hidden, matrix, bias, norm=norm, gated=True)
        fused.silu_and_multiply(torch.zeros(2, 3072, dtype=dtype))
        heads, turn = torch.zeros(2, 8, 64, dtype=dtype), torch.zeros(2, 64, dtype=dtype)
        norm = torch.zeros(64, dtype=dtype)
        fused.norm_and_rotate(heads, turn, turn.clone(), None, None, 4, 1e-6)
        fused.norm_and_rotate(heads, turn, turn.clone(), norm, norm.clone(), 4, 1e-6)
        sides = [cached_heads.CachedHeads(data=torch.zeros(8, 16, 2, 64)) for _ in range(2)]
        target = cached_heads.CacheTarget(
            keys=sides[0], values=sides[1], slots=ints(2, dtype=torch.int64)
        )
        fused.norm_and_rotate(heads, turn, turn.clone(), None, None, 4, 1e-6, target=target)


def attention() -> None:
    plain = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)]
    small = [(torch.bfloat16, d) for d in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)]
    options = attention_tile.AttentionOptions(scale=0.1, window=None, softcap=None)
    for dtype, stored in [*plain, (torch.float16, torch.float16), *small]:
        attend(dtype, stored, options)
    options = attention_tile.AttentionOptions(scale=0.1, window=24, softcap=30.0)
    attend(torch.bfloat16, torch.bfloat16, options)
    attend(torch.bfloat16, torch.float8_e4m3fn, options, scaled=True)


def attend(
    dtype: torch.dtype,
    stored: torch.dtype,
    options: attention_tile.AttentionOptions,
    *,
    scaled: bool = False,
) -> None:
    """Write and attend to a cache of 2 heads of width 64 for 4 query heads."""

    def side() -> cached_heads.CachedHeads:
        data = torch.zeros(8, 16, 2, 64, dtype=torch.uint8 if stored.itemsize == 1 else stored)
        scales = torch.zeros(8, 16, 2) if scaled or stored == torch.int8 else None
        return cached_heads.CachedHeads(data=data.view(stored), scales=scales)

    keys, values = side(), side()
    new, slots = torch.zeros(3, 2, 64, dtype=dtype), ints(3, dtype=torch.int64)
    if stored.itemsize == 1:
        kv_cache.write_quantized(new, slots, keys)
    else:
        kv_cache.write_plain(new, new.clone(), slots, keys, values)
    query, table, lengths = torch.zeros(3, 4, 64, dtype=dtype), ints(3, 4), ints(3)
    paged_decode.paged_decode(query, keys, values, table, lengths, 64, options)
    paged_prefill.paged_prefill(query, keys, values, table, ints(4), lengths, ints(3, 2), options)


if __name__ == "__main__":
    assert triton is not None
    main()
