"""Ranks that are processes compute what emulated ranks compute, to the last bit."""

from __future__ import annotations

import pytest
import torch

from tests.parallel.emulated import emulated, emulated_harness
from tests.parallel.processes import CPU, PROMPTS, STEPS, Case, run_processes
from tests.tiny import differing_columns
from trace_audit.config import ParallelConfig

DTYPES = [torch.float32, torch.bfloat16]
FAMILIES = ["llama", "qwen3", "gemma3", "qwen3-moe"]


def layouts(size: int) -> list[tuple[str, torch.dtype, ParallelConfig]]:
    """What a number of processes is asked to run: family, dtype, configuration."""
    found = []
    for dtype in DTYPES:
        if size == 2:
            # a + b has one order, so the library's own sum is the emulated one.
            found += [(f, dtype, process(2, reduction="native")) for f in FAMILIES]
            found += [(f, dtype, process(1, 2)) for f in ("granite", "gemma2")]
        if size == 3:
            found += [("llama-9h", dtype, process(3)), ("llama-9h", dtype, process(1, 3))]
            found += [("llama-9h", dtype, process(3, reduction="ring"))]
        if size == 4:
            found += [(f, dtype, process(4)) for f in FAMILIES]
            found += [("llama", dtype, process(2, 2, reduction="native"))]
            found += [("llama-tied", dtype, process(4, reduction_dtype="float32"))]
    return found


def process(tensor: int, pipeline: int = 1, reduction: str = "rank_order", **more: str):
    return ParallelConfig(
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        backend="process",
        reduction=reduction,  # type: ignore[arg-type]
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("size", [2, 3, 4])
def test_processes_equal_emulated_ranks_in_every_column(checkpoint, tmp_path, size):
    cases = [
        Case(directory=checkpoint(family), dtype=dtype, parallel=parallel)
        for family, dtype, parallel in layouts(size)
    ]
    for case, outputs in zip(cases, run_processes(cases, tmp_path), strict=True):
        order = case.parallel.reduction
        alike = emulated(
            case.parallel.tensor_parallel_size,
            case.parallel.pipeline_parallel_size,
            reduction="rank_order" if order == "native" else order,
            reduction_dtype=case.parallel.reduction_dtype,
        )
        with emulated_harness(case.directory, CPU, alike, case.dtype) as harness:
            expected = harness.record(PROMPTS, STEPS)
        assert all(len(o.token_ids) == STEPS for o in outputs)
        assert differing_columns(expected, outputs) == set(), case
