"""Reads of the packed map inside a kernel, 64 columns of a row at a time.

Four lanes share such a group, as the lanes of a quad share a tensor core's fragment: lane q has the columns
16 a + 8 b + 2 q + e, in 8 pairs (a, b) of neighbours e = 0 and 1. A pair stays in one uint32 until it is combined with
the weight. Tensors are [rows, groups, 4], where q is the last dimension.
"""

from __future__ import annotations

import triton
import triton.language as tl


def threshold(bits: int, active: int) -> tuple[int, int, int]:
    """Return the constants with which dead_bits compares every field of a word with active - 1 at once.

    Returns:
        low: every bit except the top one of each field.
        addend: in each field, the number that carries into the top bit if the field's low bits reach those of active.
        below: all ones if active is below the middle of a field's range, otherwise 0.
    """
    ones = 0xFFFFFFFF // ((1 << bits) - 1)
    top = 1 << (bits - 1)
    return ones * (top - 1), ones * (top - active % top), 0xFFFFFFFF if active < top else 0


@triton.jit
def dead_bits(words, low, addend, below):
    """Set the top bit of each field that holds a partition above `active`; the other bits are undefined.

    A field reaches the threshold if its top bit and the top bit of the sum of the low bits are set, or one of them if
    the threshold has no top bit. This is the majority of three bits, one instruction.
    """
    carried = (words & low) + addend
    return (words & carried) | (below & (words | carried))


# The selector has 4 bits for each byte of the result: the top bit selects a byte's sign, repeated, and the others the
# byte; bytes from 4 on are the second word's.
SPREAD = tl.constexpr("prmt.b32 $0, $1, $2, $3;")


@triton.jit
def _spread(first, second, BYTE: tl.constexpr, ASM: tl.constexpr):
    """Return two 16-bit masks, low and high, that repeat the top bit of one byte of each word."""
    if ASM:
        return tl.inline_asm_elementwise(
            SPREAD,
            "=r,r,r,r",
            [first, second, 0xCC88 + 0x1111 * BYTE],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    position: tl.constexpr = 8 * BYTE + 7
    return ((first >> position) & 1) * 0xFFFF | ((second >> position) & 1) * 0xFFFF0000


@triton.jit
def dead_pairs(map, first, width, low, addend, below, BITS: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr):
    """Return masks of the inactive entries of groups of 64 columns: 8 pairs (a, b) of [rows, groups, 4] uint32.

    Args:
        map: pointers to the rows of the map as uint64, [rows, 1, 1].
        first: the first uint64 of each group in its row, [1, groups, 1].
        width: the length of a row in uint64.
        EVEN: whether every group ends within its row.
    """
    q = tl.arange(0, 4).to(tl.uint32)[None, None, :]
    masks = ()
    for i in tl.static_range(BITS):
        both = tl.load(map + first + i) if EVEN else tl.load(map + first + i, first + i < width, 0)
        words = both.to(tl.uint32), (both >> 32).to(tl.uint32)
        if BITS == 8:
            field = dead_bits(tl.where(q < 2, words[0], words[1]), low, addend, below) << (16 - 16 * (q % 2))
            masks += (_spread(field << BITS, field, 3, ASM),)
        else:
            for half in tl.static_range(2):
                # One shift moves the bit of a pair's second entry to the top of a byte; another moves that of the
                # first.
                field = dead_bits(words[half], low, addend, below) << ((3 - q) * 2 * BITS)
                for j in tl.static_range(4 // BITS):
                    masks += (_spread(field << BITS, field, (j + 1) * BITS - 1, ASM),)
    return masks


@triton.jit
def tile_ids(map, row, first, rows, cols, width, BITS: tl.constexpr, ACROSS: tl.constexpr):
    """Return partition - 1 of ACROSS adjacent entries of each row, from a byte boundary; each byte is read once.

    Args:
        row: [rows, 1].
        first: the column of the first entry.
        rows, cols: the weight's sizes; entries beyond have undefined partitions.
        width: the stride of the map's rows, in bytes.
    """
    EACH: tl.constexpr = 8 // BITS
    at = first // EACH + tl.arange(0, ACROSS // EACH)[None, :]
    bytes = tl.load(map + row.to(tl.int64) * width + at, (row < rows) & (at * EACH < cols), 0)
    shift = (tl.arange(0, EACH) * BITS).to(tl.uint8)
    return ((bytes[:, :, None] >> shift[None, None, :]) & ((1 << BITS) - 1)).reshape(row.shape[0], ACROSS)


@triton.jit
def ids(map, row, column, width, BITS: tl.constexpr, mask):
    """Return partition - 1 of any entries; row and column broadcast, and width is as in tile_ids."""
    byte = tl.load(map + row.to(tl.int64) * width + column // (8 // BITS), mask, 0)
    return (byte >> (column % (8 // BITS) * BITS).to(tl.uint8)) & ((1 << BITS) - 1)
