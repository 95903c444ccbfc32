"""exp and log inside Triton kernels, as exact as torch's own."""

from __future__ import annotations

from trace_audit.kernels.runtime import triton

if triton is not None:
    from triton import language as tl
    from triton.language.extra import libdevice

    @triton.jit
    def exp(x, INTERPRETED: tl.constexpr):
        """float32 exp; tl.exp is the hardware's approximation, whose error grows with |x|."""
        if INTERPRETED:
            return tl.exp(x)
        return libdevice.exp(x)

    @triton.jit
    def log(x, INTERPRETED: tl.constexpr):
        """float32 log; tl.log is the hardware's approximation, whose error is large near 1."""
        if INTERPRETED:
            return tl.log(x)
        return libdevice.log(x)
