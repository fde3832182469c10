"""Operations that Triton's interpreter computes differently from a GPU, written out for the interpreter only."""

from __future__ import annotations

import triton
import triton.language as tl

from partkernels.backend.triton.launch import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def round_to(value, dtype: tl.constexpr):
    """Return the nearest number of a dtype, ties to even; the interpreter truncates to bfloat16."""
    if _INTERPRETED and dtype == tl.bfloat16 and value.dtype == tl.float32:
        bits = value.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(value == value, nearest, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return value.to(dtype)


@triton.jit
def add_product(total, a, b, PRECISION: tl.constexpr):
    """Return total + a b in float32.

    The interpreter multiplies the bits of bfloat16 numbers, and adds in NumPy's order.
    """
    if _INTERPRETED:
        return total + tl.dot(a.to(tl.float64), b.to(tl.float64), out_dtype=tl.float64).to(tl.float32)
    elif PRECISION == "ieee" and a.dtype == tl.float32:
        # Partial sums of a few terms are added up: one running sum of all terms had up to three times cuBLAS's error on
        # an H200. Triton turns a plain addition into that running sum, and tl.fma does not.
        return tl.fma(tl.dot(a, b, input_precision=PRECISION), 1.0, total)
    else:
        return tl.dot(a, b, total, input_precision=PRECISION)
