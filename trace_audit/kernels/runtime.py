"""Where a Triton kernel can run: compiled on CUDA, interpreted on a CPU, or not at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

try:
    import triton
    from triton import knobs
except ImportError:  # no triton on this platform (macOS): references run, and the run says so
    triton = None


# Triton decides when a kernel is defined, whatever the variable says later; kernels are defined
# by the modules that import this one.
_INTERPRETED = triton is not None and bool(knobs.runtime.interpret)


EACH_ROUNDED = {"enable_fp_fusion": False}
"""Of the launch of every kernel that multiplies floats: no product is fused with a sum unless the
kernel says `tl.fma`. Where lanes exchange partial sums, each would fuse the product it made itself
and take the others' rounded, and what the code calls one number would differ from lane to lane."""


def is_interpreted() -> bool:
    """Whether Triton kernels run in Triton's interpreter (TRITON_INTERPRET=1 before its import)."""
    return _INTERPRETED


def can_run_triton(device: torch.device) -> bool:
    """Whether a Triton kernel can take tensors of `device` in this process.

    A compiled kernel takes CUDA tensors only, an interpreted one is meant for CPU tensors only;
    a process is one or the other, since Triton decides when a kernel is defined.
    """
    if triton is None:
        return False
    return is_interpreted() if device.type == "cpu" else not is_interpreted()


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy a host array to `device` without waiting for it (through pinned memory on CUDA)."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def kernel_mode(device: torch.device) -> str:
    """What the small kernels run as on `device`: "triton", "triton-interpreted" or "reference"."""
    if not can_run_triton(device):
        return "reference"
    return "triton-interpreted" if device.type == "cpu" else "triton"
