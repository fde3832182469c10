"""Philox4x32-7 on tensors: the counter-based generator behind maps and defaults.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
The C++ and CUDA counterpart is csrc/include/partkernels/philox.h.
"""

from __future__ import annotations

from typing import overload

from torch import Tensor

# 7 is the smallest number of rounds with which Philox4x32 passes BigCrush (Salmon et al., Table 2).
ROUNDS = 7
WORD = 0xFFFFFFFF
# Columns that share draws: a shard with drawn defaults must begin at a multiple of 64 columns.
GROUP = 64


@overload
def split(value: int) -> tuple[int, int]: ...


@overload
def split(value: Tensor) -> tuple[Tensor, Tensor]: ...


def split(value: Tensor | int) -> tuple[Tensor | int, Tensor | int]:
    """Return the low and high 32 bits of a non-negative 64-bit integer or int64 tensor."""
    return value & WORD, value >> 32


def _multiply(word: Tensor | int, multiplier: int) -> tuple[Tensor | int, Tensor | int]:
    """Return the high and low words of the product; int64 wraps around, but its 64 bits are correct."""
    product = word * multiplier
    return (product >> 32) & WORD, product & WORD


def philox4x32(
    counter: tuple[Tensor | int, Tensor | int, Tensor | int, Tensor | int], seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four pseudorandom 32-bit words for each counter.

    Args:
        counter: four words, each an int64 tensor with values in [0, 2**32) or an int; they broadcast.
        seed: the 64-bit key.

    Returns:
        Four int64 tensors with values in [0, 2**32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = split(seed)
    for _ in range(ROUNDS):
        high0, low0 = _multiply(c0, 0xD2511F53)
        high1, low1 = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3
