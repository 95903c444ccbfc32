"""Products of a few rows with a weight matrix, with what stands before and after them.

With one row a layer is bound by the reading of its weights and by the number of its launches: a
norm before a product, and the activation after it, are part of it here. Products, sums and the norm
are float32 until they leave the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trace_audit.kernels.formats import rounded
from trace_audit.kernels.overlap import overlap_options
from trace_audit.kernels.runtime import EACH_ROUNDED, is_interpreted, triton

if triton is not None:
    from triton import language as tl

    from trace_audit.kernels.overlap import wait_for_predecessor

MAX_ROWS = 2
"""More rows are left to matrix products that read a weight once for all of them."""


@dataclass(frozen=True)
class Norm:
    """An RMS norm of the sum of a product's input and the residual stream.

    Attributes:
        residual: [T, K]; None: there is none yet.
        weight: [K].
        epsilon: added to the mean square.
    """

    residual: torch.Tensor | None
    weight: torch.Tensor
    epsilon: float


@dataclass(frozen=True, kw_only=True)
class ProductConfig:
    """How the kernel is launched, and with it the order of the sums.

    Attributes:
        outputs: elements of the output a program computes.
        columns: elements of the input taken at once.
        num_warps: see Triton.
    """

    outputs: int
    columns: int
    num_warps: int


def product_config(width: int) -> ProductConfig:
    """The configuration for inputs of this width."""
    # Interpreted, a program costs far more than its lanes do.
    outputs = 64 if is_interpreted() else 2
    if width <= 1024:
        columns = min(512, triton.next_power_of_2(width))
        return ProductConfig(outputs=outputs, columns=columns, num_warps=1)
    columns = 1024 if width <= 2048 else 2048
    return ProductConfig(outputs=outputs, columns=columns, num_warps=4)


def few_rows_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    config: ProductConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A linear layer, of the normalized input if there is a norm.

    Args:
        x: [T, K], contiguous.
        weight: [N, K], contiguous; with `gated` [2 N, K], the gate's rows, then those beside it.
            It is read before the launch before this one has ended, and must be older than that.
        bias: as many numbers as the weight has rows, or None.
        norm: applied first.
        gated: silu of the gate's output times the other is what leaves.
        config: how to launch, for measurements.

    Returns:
        [T, N], and the residual stream [T, K], rounded before it is normalized; `x` itself where
        nothing is added.
    """
    num_rows, width = x.shape
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    config = config or product_config(width)
    out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    residual = None if norm is None else norm.residual
    total = x if residual is None else torch.empty_like(x)
    _few_rows_kernel[(num_rows, triton.cdiv(num_outputs, config.outputs))](
        x,
        residual,
        total,
        None if norm is None else norm.weight,
        0.0 if norm is None else norm.epsilon,
        weight,
        bias,
        out,
        num_outputs,
        WIDTH=width,
        COLUMNS=config.columns,
        OUTPUTS=config.outputs,
        GATED=gated,
        INTERPRETED=is_interpreted(),
        **EACH_ROUNDED,
        **overlap_options(x.device),
        num_warps=config.num_warps,
    )
    return out, total


if triton is not None:

    @triton.jit
    def _few_rows_kernel(
        x_ptr,  # [T, WIDTH]
        residual_ptr,  # [T, WIDTH], or None
        total_ptr,  # [T, WIDTH]
        norm_ptr,  # [WIDTH], or None
        epsilon,
        weight_ptr,  # [N, WIDTH], or [2 N, WIDTH] if GATED
        bias_ptr,  # [N], or [2 N] if GATED, or None
        out_ptr,  # [T, N]
        num_outputs,
        WIDTH: tl.constexpr,
        COLUMNS: tl.constexpr,
        OUTPUTS: tl.constexpr,
        GATED: tl.constexpr,
        INTERPRETED: tl.constexpr,
        OVERLAPS: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        real = output < num_outputs
        lane = tl.arange(0, COLUMNS)
        dtype = out_ptr.dtype.element_ty
        weight_ptr += output.to(tl.int64)[:, None] * WIDTH + lane[None, :]
        other_ptr = weight_ptr
        if GATED:
            other_ptr += num_outputs.to(tl.int64) * WIDTH
        # One program a row leaves the residual stream.
        left = tl.where(tl.program_id(1) == 0, WIDTH, 0)
        acc = tl.zeros([OUTPUTS, COLUMNS], tl.float32)
        beside = acc
        square = tl.zeros([COLUMNS], tl.float32)
        # The first weights are on their way while the launch before this one ends.
        known = real[:, None] & (lane < WIDTH)[None, :]
        w = tl.load(weight_ptr, mask=known, other=0.0)
        other = w
        if GATED:
            other = tl.load(other_ptr, mask=known, other=0.0)
        wait_for_predecessor(OVERLAPS)
        for start in tl.static_range(0, WIDTH, COLUMNS):
            at = start + lane
            inside = at < WIDTH
            if start > 0:
                known = real[:, None] & inside[None, :]
                w = tl.load(weight_ptr + start, mask=known, other=0.0)
                if GATED:
                    other = tl.load(other_ptr + start, mask=known, other=0.0)
            x = tl.load(x_ptr + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
            if residual_ptr is not None:
                x += tl.load(residual_ptr + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
                x = rounded(x, dtype, INTERPRETED).to(tl.float32)
                tl.store(total_ptr + row * WIDTH + at, x, mask=at < left)
            if norm_ptr is not None:
                square = tl.fma(x, x, square)
                x *= tl.load(norm_ptr + at, mask=inside, other=0.0).to(tl.float32)
            acc = tl.fma(w.to(tl.float32), x[None, :], acc)
            if GATED:
                beside = tl.fma(other.to(tl.float32), x[None, :], beside)
        scale = 1.0
        if norm_ptr is not None:
            scale = tl.rsqrt(tl.sum(square, axis=0) / WIDTH + epsilon)
        y = tl.sum(acc, axis=1) * scale
        if bias_ptr is not None:
            y += tl.load(bias_ptr + output, mask=real, other=0.0).to(tl.float32)
        if GATED:
            up = tl.sum(beside, axis=1) * scale
            if bias_ptr is not None:
                up += tl.load(bias_ptr + num_outputs + output, mask=real, other=0.0).to(tl.float32)
            y = y / (1.0 + tl.exp(-y)) * up
        tl.store(out_ptr + row * num_outputs + output, rounded(y, dtype, INTERPRETED), mask=real)
