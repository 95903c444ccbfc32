"""Number formats inside Triton kernels, in integer arithmetic: one code for every device.

Triton compiles 8-bit floats for some GPUs only, and its interpreter truncates to bfloat16 and reads
the NaNs of 8-bit floats as numbers.
"""

from __future__ import annotations

from trace_audit.kernels.runtime import triton

if triton is not None:
    from triton import language as tl

    @triton.jit
    def rounded(x, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
        """`x` rounded to `dtype`, to nearest even; interpreted, as the float32 of that value.

        The interpreter multiplies the bits of bfloat16; products of such float32 are the same.
        """
        if INTERPRETED:
            x = x.to(tl.float32)
            if dtype == tl.bfloat16:
                bits = x.to(tl.int32, bitcast=True)
                nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
                x = tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)
            elif dtype == tl.float16:
                x = x.to(tl.float16).to(tl.float32)
        else:
            x = x.to(dtype)
        return x

    @triton.jit
    def decoded(stored, scale, FP8: tl.constexpr):
        """What the cache holds, as float32 where that is 8 bits wide.

        Args:
            stored: as it is; 8-bit floats as uint8.
            scale: float32 factors that broadcast to it, or None.
            FP8: "e4m3", "e5m2" or empty.
        """
        value = stored
        if FP8 == "e4m3":
            # float16 whose exponent is 8 too small: its subnormals are those of e4m3.
            code = stored.to(tl.uint16)
            half = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
            value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
            value = tl.where((code & 0x7F) == 0x7F, float("nan"), value)
        elif FP8 == "e5m2":
            half = stored.to(tl.uint16) << 8
            value = half.to(tl.float16, bitcast=True).to(tl.float32)
        if scale is not None:
            value = value.to(tl.float32) * scale
        return value

    @triton.jit
    def encoded_fp8(x, FP8: tl.constexpr):
        """The uint8 code nearest to float32 `x`, ties to even; |x| at most the largest, or NaN."""
        magnitude = tl.abs(x)
        bits = magnitude.to(tl.int32, bitcast=True)
        # A subnormal is rounded to a multiple of the smallest one by float32 itself, where a
        # power of two (2^14, 2^7) is added whose last bit is that large.
        if FP8 == "e4m3":
            normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
            subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
            code = tl.where(magnitude < 2.0**-6, subnormal, normal)
        else:
            normal = ((bits + 0xFFFFF + ((bits >> 21) & 1)) >> 21) - (112 << 2)
            subnormal = (magnitude + 128.0).to(tl.int32, bitcast=True) - 0x43000000
            code = tl.where(magnitude < 2.0**-14, subnormal, normal)
        sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
        return tl.where(x == x, code | sign, 0x7F).to(tl.uint8)
