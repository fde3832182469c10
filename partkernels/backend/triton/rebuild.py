"""A tile of a subnetwork's weight, rebuilt in registers from the weight, the packed map and the defaults.

All steps but the last work on pairs of neighbouring columns (see packed_map); then pairs are split into entries. These
are in the order of a tensor core's operand, so that the compiler moves no data between threads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from partkernels.backend.triton.defaults import drawn_pairs
from partkernels.backend.triton.packed_map import dead_pairs
from partkernels.formats import philox

# Columns that share draws and, in a map of 2 bits, 16 bytes.
GROUP = tl.constexpr(philox.GROUP)


@triton.jit
def _columns(pairs, NARROW: tl.constexpr):
    """Return 8 pairs of [rows, groups, 4] as the 64 columns of each group, [rows, 64 groups].

    16-bit entries are the halves of a pair. Wider entries have a half as their top bits: an arithmetic shift then
    repeats a mask, and a bfloat16 number is the equal float32.
    """
    b0 = tl.join(tl.join(pairs[0], pairs[1]), tl.join(pairs[4], pairs[5]))  # [..., b, a // 2], a even
    b1 = tl.join(tl.join(pairs[2], pairs[3]), tl.join(pairs[6], pairs[7]))
    joined = tl.join(b0, b1)  # [rows, groups, q, b, a // 2, a % 2]
    if NARROW:
        entries = tl.join(joined.to(tl.int16), (joined >> 16).to(tl.int16))
    else:
        entries = tl.join((joined << 16).to(tl.int32, bitcast=True), (joined & 0xFFFF0000).to(tl.int32, bitcast=True))
    ordered = entries.permute(0, 1, 4, 5, 3, 2, 6)  # [rows, groups, a // 2, a % 2, b, q, e]
    return ordered.reshape(ordered.shape[0], 64 * ordered.shape[1])


SELECT = tl.constexpr("lop3.b32 $0, $1, $2, $3, 0xCA;")


@triton.jit
def _select(mask, default, weight, ASM: tl.constexpr):
    """Return default where the mask's bits are set and weight elsewhere, two entries at once."""
    if ASM:
        return tl.inline_asm_elementwise(
            SELECT, "=r,r,r,r", [mask, default, weight], dtype=tl.int16, is_pure=True, pack=2
        )
    return (mask & default) | (~mask & weight)


@triton.jit
def rebuild(
    weight, stored, map, row, group, row_bytes,
    low, addend, below, step, seed_low, seed_high, stream_low, stream_high, first_group,
    BITS: tl.constexpr, KIND: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Rebuild a tile of the subnetwork: the weight's entries where active, defaults elsewhere.

    Args:
        weight: [rows, 64 groups], any floating-point dtype; the first column is 64 group.
        stored: like weight, if KIND is "stored"; otherwise unused.
        map: pointers to the rows of the map, [rows, 1, 1].
        row: [rows, 1], in the full weight; arbitrary where an entry is not used.
        row_bytes: bytes in a row of the map.
        low, ..., first_group: uint32, the words from launch.subnetwork.
        EVEN: whether every group ends within the weight's columns.
    """
    tl.static_assert(weight.shape[1] % GROUP == 0, "a tile of a weight must have whole groups of 64 columns")
    width: tl.constexpr = weight.dtype.primitive_bitwidth
    bits: tl.constexpr = tl.int16 if width == 16 else tl.int32 if width == 32 else tl.int64
    asm: tl.constexpr = ASM and width == 16
    group += tl.arange(0, weight.shape[1] // GROUP)[None, :, None]
    pairs = dead_pairs(
        map.to(tl.pointer_type(tl.uint64)), group * BITS, row_bytes // 8,
        low.to(tl.uint32), addend.to(tl.uint32), below.to(tl.uint32), BITS, EVEN, ASM,
    )  # fmt: skip
    dead = _columns(pairs, width == 16)
    if width > 16:
        dead = (dead >> 16).to(bits)
    if KIND == "zeros":
        default = tl.zeros(weight.shape, bits)
    elif KIND == "stored":
        default = stored
    else:
        pairs = drawn_pairs(
            row.to(tl.uint32)[:, :, None], group.to(tl.uint32) + first_group.to(tl.uint32), step.to(tl.uint32),
            seed_low.to(tl.uint32), seed_high.to(tl.uint32), stream_low.to(tl.uint32), stream_high.to(tl.uint32),
            KIND, ASM,
        )  # fmt: skip
        default = _columns(pairs, width == 16)
        if width == 16:
            default = default.to(tl.bfloat16, bitcast=True)
            if weight.dtype == tl.float16:
                default = default.to(tl.float32).to(tl.float16)
        else:
            default = default.to(tl.float32, bitcast=True).to(weight.dtype)
    return _select(dead, default.to(bits, bitcast=True), weight.to(bits, bitcast=True), asm).to(
        weight.dtype, bitcast=True
    )
