"""Several small tensors in one launch: each tensor's arguments are passed by value, in tuples.

A table in GPU memory would cost as much, about 60 us of Python and a copy, and each replay of a CUDA graph would copy
it again from host memory that may have been reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import triton
import triton.language as tl
from torch import Tensor

# Tensors per launch. Adam's 10 numbers per tensor take 1 KB of the 4 KB allowed for kernel arguments. To select a
# tensor's numbers takes a program 34 instruction slots per entry (sm_90), beside the 87 of its step; with 32 tensors it
# would take 52 and save 0.5 us per tensor. A launch takes Python 90 us for 16 tensors, 55 for 3 and 20 for 1, without
# the driver's share.
LEAST, MOST = 3, 16
# Triton compiles a kernel for each mix of ones and multiples of 16 in a tuple, even under do_not_specialize. Shifted by
# 4, all numbers are multiples of 16; addresses have bits to spare.
_SHIFT = tl.constexpr(4)


def in_tuples(each: Sequence[Sequence[Tensor | int | None]], programs: Sequence[int]) -> tuple[list, int]:
    """Return a kernel's arguments for several tensors, and its number of programs.

    Args:
        each: each tensor's addresses and numbers; an item is None for all tensors or for none.
        programs: each tensor's number of programs.

    Returns:
        one tuple per item, or None if all are 1 or None; the last tuple has each tensor's first program.
    """
    *firsts, total = accumulate(programs, initial=0)
    # One kernel serves any number of tensors: missing ones begin after the last program.
    missing = MOST - len(each)
    columns = [_in_tuple(column + column[:1] * missing) for column in zip(*each, strict=True)]
    return [*columns, _in_tuple(firsts + [total] * missing)], total


def _in_tuple(numbers: Sequence[Tensor | int | None]) -> tuple[int, ...] | None:
    if isinstance(numbers[0], Tensor):
        numbers = [tensor.data_ptr() for tensor in numbers]
    elif numbers[0] is None or set(numbers) == {1}:
        return None
    return tuple([number << _SHIFT.value for number in numbers])


@triton.jit
def own(numbers, firsts):
    """Return the item of this program's tensor, the last one that starts at or before this program."""
    if numbers is None:
        return 1
    else:
        number = numbers[0]
        for i in tl.static_range(1, len(firsts)):
            number = tl.where(tl.program_id(0) >= firsts[i] >> _SHIFT, numbers[i], number)
        return number >> _SHIFT


@triton.jit
def own_pointer(addresses, firsts, TYPE: tl.constexpr):
    return own(addresses, firsts).to(tl.pointer_type(TYPE))
