"""Sums of short rows whose order depends on nothing but the row's length."""

from __future__ import annotations

import torch

from trace_audit.kernels.runtime import can_run_triton, triton

if triton is not None:
    from triton import language as tl

_TILE = 1024


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension, of each row in the same order whatever stands beside it.

    torch on CUDA chooses how to split a sum by the number of rows, so that a row's last bits would
    depend on its neighbours; on a CPU it does not.

    Args:
        x: [..., N] in float32 or float64.

    Returns:
        [...] in the dtype of `x`.
    """
    if x.device.type == "cpu" or not can_run_triton(x.device):
        return x.sum(-1)
    return row_sum_in_tiles(x)


def row_sum_in_tiles(x: torch.Tensor) -> torch.Tensor:
    """`row_sum` by a kernel: tile after tile, each a tree of its own."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty(rows.shape[0], dtype=x.dtype, device=x.device)
    width = rows.shape[1]
    tile = min(_TILE, int(triton.next_power_of_2(width)))
    _row_sum_kernel[(rows.shape[0],)](rows, *rows.stride(), width, out, TILE=tile)
    return out.view(x.shape[:-1])


if triton is not None:

    @triton.jit
    def _row_sum_kernel(
        x_ptr,  # [R, N]
        stride_row,
        stride_column,
        width,
        out_ptr,  # [R]
        TILE: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        lane = tl.arange(0, TILE)
        total = tl.zeros([1], out_ptr.dtype.element_ty)
        for start in range(0, width, TILE):
            at = start + lane
            x = tl.load(x_ptr + row * stride_row + at * stride_column, mask=at < width, other=0.0)
            total += tl.sum(x, axis=0)
        tl.store(out_ptr + row + tl.arange(0, 1), total)
