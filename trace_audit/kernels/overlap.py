"""Launches that begin before the one before them has ended: programmatic dependent launch.

A kernel launched with `overlap_options` may start as soon as every program of the launch before it
has called `wait_for_predecessor` or ended. Until it calls that itself, it must write nothing, and
read only what was there before the launch before it: weights.
"""

from __future__ import annotations

import functools

import torch

from trace_audit.kernels.runtime import can_run_triton, triton

if triton is not None:
    from triton import language as tl
    from triton.language.extra import cuda

_FIRST_CAPABILITY = (9, 0)  # NVIDIA Hopper


def overlap_options(device: torch.device) -> dict[str, bool]:
    """Arguments of the launch of a kernel that waits, on a device that can overlap or not."""
    return {"OVERLAPS": True, "launch_pdl": True} if _overlaps(device) else {"OVERLAPS": False}


@functools.cache
def _overlaps(device: torch.device) -> bool:
    if device.type != "cuda" or not can_run_triton(device) or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY


if triton is not None:

    @triton.jit
    def wait_for_predecessor(OVERLAPS: tl.constexpr):
        """Wait until all that was launched before has ended, then let the next launch begin."""
        if OVERLAPS:
            cuda.gdc_wait()
            cuda.gdc_launch_dependents()
