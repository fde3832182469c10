"""Drawing of defaults, format 1, inside a kernel; they are defined in partkernels.defaults.

Values are drawn in pairs, two bfloat16 numbers in a uint32, in the layout of packed_map's masks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from partkernels.backend.triton.arithmetic import round_to
from partkernels.backend.triton.philox import philox4x32


@triton.jit
def _bfloat16_bits(value):
    return round_to(value, tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)


# Selects two bytes of $1, a word of draws, by $2. $3 is u, $4 is 1, $5 is -127.5 and $6 is -0, each twice in bfloat16.
# 0x4300 | m is 128 + m; adding -127.5 makes it m + 1/2, exactly. fma is the only bfloat16 arithmetic on sm_80.
UNIFORM_PAIR = tl.constexpr(
    """{
    .reg .b32 bytes, value, sign;
    prmt.b32 bytes, $1, 0, $2;
    lop3.b32 value, bytes, 0x007f007f, 0x43004300, 0xEA;
    fma.rn.bf16x2 value, value, $4, $5;
    fma.rn.bf16x2 value, value, $3, $6;
    shl.b32 sign, bytes, 8;
    lop3.b32 $0, sign, 0x80008000, value, 0x6A;
    }"""
)


@triton.jit
def _uniform_pair(word, step, HALF: tl.constexpr, ASM: tl.constexpr):
    """Return (-1)^sign (m + 1/2) u for two bytes of a word; step holds u, a bfloat16 number, twice."""
    if ASM:
        return tl.inline_asm_elementwise(
            UNIFORM_PAIR,
            "=r,r,r,r,r,r,r",
            [word, 0x4140 + 0x0202 * HALF, step, 0x3F803F80, 0xC2FFC2FF, 0x80008000],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    u = (step << 16).to(tl.float32, bitcast=True)
    bytes = word >> (16 * HALF)
    low = _bfloat16_bits(((bytes & 0x7F).to(tl.float32) + 0.5) * u) | ((bytes & 0x80) << 8)
    high = _bfloat16_bits((((bytes >> 8) & 0x7F).to(tl.float32) + 0.5) * u) | (bytes & 0x8000)
    return low | (high << 16)


@triton.jit
def _uniform_pairs(row, group, step, seed_low, seed_high, stream_low, stream_high, ASM: tl.constexpr):
    q = tl.arange(0, 4).to(tl.uint32)[None, None, :]
    words = philox4x32(4 * group + q, row, stream_low, stream_high, seed_low, seed_high)
    pairs = ()
    for a in tl.static_range(4):
        pairs += (_uniform_pair(words[a], step, 0, ASM), _uniform_pair(words[a], step, 1, ASM))
    return pairs


@triton.jit
def _normal_bits(word, step):
    """Return the bfloat16 bits of the centred and scaled sum of a word's four bytes."""
    halves = (word & 0x00FF00FF) + ((word >> 8) & 0x00FF00FF)
    total = ((halves & 0xFFFF) + (halves >> 16)).to(tl.int32) - 510
    return _bfloat16_bits(total.to(tl.float32) * step.to(tl.float32, bitcast=True))


@triton.jit
def _normal_pairs(row, group, step, seed_low, seed_high, stream_low, stream_high):
    q = tl.arange(0, 4).to(tl.uint32)[None, None, :]
    pairs = ()
    for pair in tl.static_range(8):
        # Lanes 2 i and 2 i + 1 share a call and use half of its words each.
        c0 = 16 * group + 2 * pair + q // 2
        words = philox4x32(c0, row, stream_low, stream_high, seed_low, seed_high)
        low = _normal_bits(tl.where(q % 2 == 0, words[0], words[2]), step)
        high = _normal_bits(tl.where(q % 2 == 0, words[1], words[3]), step)
        pairs += (low | (high << 16),)
    return pairs


@triton.jit
def drawn_pairs(row, group, step, seed_low, seed_high, stream_low, stream_high, KIND: tl.constexpr, ASM: tl.constexpr):
    """Return the defaults of groups of 64 columns: 8 pairs (a, b) of [rows, groups, 4] uint32.

    Args:
        row: [rows, 1, 1] uint32, in the full weight.
        group: [1, groups, 1] uint32, column // 64.
        step: the step of a draw: for uniform defaults a bfloat16 number, twice; for normal ones the bits of a float32.
    """
    if KIND == "uniform":
        return _uniform_pairs(row, group, step, seed_low, seed_high, stream_low, stream_high, ASM)
    else:
        tl.static_assert(KIND == "normal")
        return _normal_pairs(row, group, step, seed_low, seed_high, stream_low, stream_high)
