"""Several small tensors in one launch: what a kernel needs of each goes by value, in tuples.

A table of them in the GPU's memory would cost as much, some 60 us of Python and a copy, and a CUDA graph would copy it
again in each replay, from memory of the host that is something else's by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import triton
import triton.language as tl
from torch import Tensor

# Tensors of a launch. Of Adam's 10 numbers of each, 1 KB of the 4 that a kernel's arguments may take, a program selects
# its own: 34 slots an entry (sm_90) beside the 87 of its step. 32 tensors would be 52 slots, and save half a us each.
# Python is at a launch of 16 for 90 us, of 3 for 55, and of 1 for 20, without the driver's share.
LEAST, MOST = 3, 16
# Triton compiles a kernel anew for each mix of ones and multiples of 16 in a tuple, whatever it is told not to
# specialise: so all are multiples. Addresses have bits to spare.
_SHIFT = tl.constexpr(4)


def in_tuples(each: Sequence[Sequence[Tensor | int | None]], programs: Sequence[int]) -> tuple[list, int]:
    """What a kernel takes of several tensors, and how many programs it has.

    Args:
        each: of each tensor its addresses and numbers; None of all or of none.
        programs: of each.

    Returns:
        a tuple of each number, None where all are 1 or None; at last that of each tensor's first program.
    """
    *firsts, total = accumulate(programs, initial=0)
    # One kernel for any number of tensors: those that are missing begin behind the last program.
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
    """The program's tensor's: that of the last tensor whose first program is not beyond it."""
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
