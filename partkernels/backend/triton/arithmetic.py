"""What Triton's interpreter computes otherwise than a GPU: there, and only there, it is spelt out."""

from __future__ import annotations

import triton
import triton.language as tl

from partkernels.backend.triton.launch import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def round_to(value, dtype: tl.constexpr):
    """The nearest number of a type, ties to even. (The interpreter cuts a bfloat16's last bits off.)"""
    if _INTERPRETED and dtype == tl.bfloat16 and value.dtype == tl.float32:
        bits = value.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(value == value, nearest, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return value.to(dtype)


@triton.jit
def add_product(total, a, b, PRECISION: tl.constexpr):
    """total + a b, in float32. (The interpreter multiplies the bits of bfloat16 numbers, and adds in NumPy's order.)"""
    if _INTERPRETED:
        return total + tl.dot(a.to(tl.float64), b.to(tl.float64), out_dtype=tl.float64).to(tl.float32)
    elif PRECISION == "ieee" and a.dtype == tl.float32:
        # Sums of a few terms are added up: one running sum of all erred up to three times as much as cuBLAS on an H200.
        # By fma, since of a plain sum Triton makes that running one.
        return tl.fma(tl.dot(a, b, input_precision=PRECISION), 1.0, total)
    else:
        return tl.dot(a, b, total, input_precision=PRECISION)
