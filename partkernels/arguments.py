"""Helpers that compute and check arguments of partitions, defaults, convolutions and steps, without torch or numpy.

partkernels_numpy includes this file, too.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from fractions import Fraction
from numbers import Integral, Real
from typing import Protocol

# Rows start at multiples of 16 bytes, the size of one vector load on all supported GPUs and CPUs.
ROW_ALIGNMENT = 16
MAX_COUNT = 256
# Proportions that sum to 1 up to this are used as written. Others were rounded, to float32 or to a few digits, and
# are divided by their sum. Dividing all of them would break ties differently and change the map of every seed.
AS_WRITTEN = 1e-12
# In this range the step of a draw is a normal bfloat16 number on every backend, even if it flushes subnormals to zero.
SCALE_RANGE = (1e-30, 1e30)
SEED_LIMIT = 1 << 63


class InputError(RuntimeError, ValueError):
    """x or bias does not fit the weight: a ValueError, and a RuntimeError like the errors of torch's operators."""


class Partitioned(Protocol):
    """A partition of either package."""

    @property
    def num_partitions(self) -> int: ...


def bits_for(num_partitions: int) -> int:
    """Return the smallest of 1, 2, 4, 8 with 2**bits >= num_partitions."""
    return next(bits for bits in (1, 2, 4, 8) if 1 << bits >= num_partitions)


def row_bytes(cols: int, bits: int) -> int:
    """Return the bytes in a row of the map, including padding."""
    used = -(-cols * bits // 8)
    return -(-used // ROW_ALIGNMENT) * ROW_ALIGNMENT


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (rows, cols) of a weight of this shape."""
    return shape[0], math.prod(shape[1:])


def sizes(total: int, proportions: Sequence[float]) -> list[int]:
    """Split total by the proportions, by largest remainder; ties go to the lower partition.

    Args:
        total: the number of items to split, 0 or more.
        proportions: 1 to 256 numbers in [0, 1] that sum to 1 within 1e-6; they are divided by their sum.

    Raises:
        ValueError: the proportions violate these conditions.

    Example:
        >>> sizes(10, (0.8, 0.15, 0.05))
        [8, 2, 0]
    """
    try:
        proportions = tuple(float(p) for p in proportions)
    except TypeError:
        raise TypeError(
            f"proportions {proportions!r} are not a sequence of numbers; pass one for each partition."
        ) from None
    if not 1 <= len(proportions) <= MAX_COUNT:
        raise ValueError(f"{len(proportions)} proportions were given; pass 1 to {MAX_COUNT}, one for each partition.")
    if not all(p >= 0 for p in proportions) or not math.isclose(sum(proportions), 1, abs_tol=1e-6):
        raise ValueError(
            f"proportions {proportions} sum to {sum(proportions):g}; pass numbers that are not negative and sum to 1."
        )
    if abs(sum(proportions) - 1) > AS_WRITTEN or total * AS_WRITTEN > 0.1:
        whole = sum(map(Fraction, proportions))
        proportions = [Fraction(p) / whole for p in proportions]
    exact = [p * total for p in proportions]
    parts = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(parts)), key=lambda j: parts[j] - exact[j])
    for j in by_remainder[: total - sum(parts)]:
        parts[j] += 1
    return parts


def checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a weight's shape as a tuple; raise unless each size is at least 1."""
    try:
        shape = tuple(map(operator.index, shape))
    except TypeError:
        raise TypeError(f"shape {shape!r} is not a sequence of ints; pass a weight's shape.") from None
    if not shape or any(n < 1 for n in shape):
        raise ValueError(f"shape {shape} is empty; pass a weight's shape, each size at least 1.")
    return shape


def meets_itself(shape: Sequence[int], strides: Sequence[int], unit: int = 1) -> bool:
    """Return whether entries of an array may share memory; always False for slices, transposed and reversed arrays.

    Args:
        unit: the size of an entry, in the unit of strides.
    """
    reach = 0  # of the dimensions processed so far
    for stride, n in sorted((abs(stride), n) for stride, n in zip(strides, shape, strict=True) if n > 1):
        if stride < reach + unit:
            return 0 not in shape
        reach += (n - 1) * stride
    return False


def check_count(num_partitions: int) -> None:
    """Raise ValueError unless num_partitions is a valid number of partitions."""
    if isinstance(num_partitions, bool) or not isinstance(num_partitions, int) or not 1 <= num_partitions <= MAX_COUNT:
        raise ValueError(f"num_partitions={num_partitions!r}; pass an int from 1 to {MAX_COUNT}.")


def count_of_ids(low: int, high: int, num_partitions: int | None) -> int:
    """Return num_partitions, or `high` if None; raise ValueError unless ids from low to high fit so many partitions."""
    if low < 1:
        raise ValueError(f"ids run from {low} to {high}; partitions are numbered from 1: pass ids in 1..C.")
    num_partitions = high if num_partitions is None else num_partitions
    check_count(num_partitions)
    if high > num_partitions:
        raise ValueError(
            f"ids run from {low} to {high}, but there are {num_partitions} partitions; pass ids in 1..{num_partitions}."
        )
    return num_partitions


def check_range(name: str, start: int, stop: int, size: int) -> None:
    """Raise ValueError unless start:stop is a nonempty range within size."""
    if not 0 <= start < stop <= size:
        raise ValueError(f"{name}({start}, {stop}) of {size}; pass 0 <= start < stop <= {size}.")


def check_seed(name: str, seed: int) -> None:
    """Raise unless seed is an integer in [0, 2**63)."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"{name}={seed!r} is a {type(seed).__name__}; pass an int in [0, 2**63).")
    if not 0 <= seed < SEED_LIMIT:
        raise ValueError(f"{name}={seed} is out of range; pass an int in [0, 2**63).")


def check_scale(name: str, scale: float) -> None:
    """Raise unless defaults can be drawn with this half-width or standard deviation."""
    if isinstance(scale, bool) or not isinstance(scale, Real):
        raise TypeError(f"{name}={scale!r} is a {type(scale).__name__}; pass a number.")
    low, high = SCALE_RANGE
    if not low <= float(scale) <= high:  # also false for NaN
        raise ValueError(f"{name}={scale} is out of range; pass a number in [{low}, {high}], or use Zeros().")


def check_number(name: str, number: int, partition: Partitioned) -> None:
    """Raise ValueError unless number is the number of a partition, 1..partition.num_partitions."""
    num_partitions = partition.num_partitions
    if type(number) is not int or not 1 <= number <= num_partitions:
        raise ValueError(
            f"{name}={number!r}, but this partition has {num_partitions} parts; pass an int in 1..{num_partitions}."
        )


def check_live(partition: Partitioned, active: int, update: int | None) -> None:
    """Raise ValueError unless 1 <= update <= active <= partition.num_partitions."""
    check_number("active", active, partition)
    if update is not None and (type(update) is not int or not 1 <= update <= active):
        raise ValueError(
            f"update={update!r} with active={active}; pass an int in 1..{active}, or None for no weight gradient."
        )


def of_each(name: str, value: int | Sequence[int], dims: int, least: int) -> tuple[int, ...]:
    """Return one int per dimension, from one for all or one for each; raise ValueError if below least or not int64."""
    sizes = (value,) if isinstance(value, Integral) else value
    # numpy ints may have few bits, in which sums overflow.
    sizes = [int(n) if isinstance(n, Integral) else n for n in sizes] if isinstance(sizes, tuple | list) else []
    if len(sizes) == 1:
        sizes *= dims
    if len(sizes) != dims or any(isinstance(n, float | str) or not least <= n < SEED_LIMIT for n in sizes):
        what = "a pair of ints, each" if dims == 2 else "one"
        raise ValueError(f"{name}={value!r}; pass an int or {what} at least {least} and below 2**63.")
    return tuple(sizes)


def convolution_geometry(
    image: Sequence[int],
    kernel: Sequence[int],
    stride: int | Sequence[int],
    padding: int | Sequence[int] | str,
    dilation: int | Sequence[int],
) -> tuple[tuple[int, ...], ...]:
    """Return stride, padding and dilation of each dimension, and the extra padding at each dimension's end.

    Args:
        image, kernel: their sizes in each dimension.
        stride, padding, dilation: conv2d's arguments.
    """
    dims = len(kernel)
    stride, dilation = of_each("stride", stride, dims, least=1), of_each("dilation", dilation, dims, least=1)
    before = (0,) * dims
    if padding == "valid":
        padding = (0,) * dims
    elif padding == "same":
        if any(s != 1 for s in stride):
            raise ValueError(f"padding='same' with stride={stride}; 'same' needs stride 1.")
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        padding, before = tuple(t // 2 for t in total), tuple(t % 2 for t in total)
    elif isinstance(padding, str):
        raise ValueError(f"padding={padding!r}; pass an int, an int for each dimension, 'valid' or 'same'.")
    else:
        padding = of_each("padding", padding, dims, least=0)
    for size, extent, p, more, d in zip(image, kernel, padding, before, dilation, strict=True):
        if size + more + 2 * p < d * (extent - 1) + 1:
            raise InputError(
                f"the padded input of size {size + more + 2 * p} is smaller than the kernel, {d * (extent - 1) + 1}"
                f" with dilation {d}; pass a larger image or more padding."
            )
    return stride, padding, dilation, before


def check_not_negative(**numbers: float) -> None:
    """Raise ValueError, naming it, for the first number that is negative, infinite or NaN."""
    for name, number in numbers.items():
        try:
            is_fine = 0 <= number < math.inf
        except TypeError:
            raise TypeError(f"{name}={number!r} is a {type(number).__name__}; pass a number.") from None
        if not is_fine:
            raise ValueError(f"{name}={number}; pass a finite number that is not negative.")


def check_momentum(momentum: float, nesterov: bool) -> None:
    """Raise ValueError unless SGD can use these values."""
    check_not_negative(momentum=momentum)
    if nesterov and momentum == 0:
        raise ValueError("nesterov=True with momentum=0; pass a positive momentum.")


def check_betas(betas: tuple[float, float]) -> None:
    """Raise ValueError unless Adam can use these values."""
    if not isinstance(betas, Sequence) or len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas={betas}; pass two numbers in [0, 1), as a tuple.")


def check_step(step: int) -> None:
    """Raise ValueError unless step is a valid step number."""
    if isinstance(step, bool) or not isinstance(step, int) or not 1 <= step < SEED_LIMIT:
        raise ValueError(f"step={step!r}; pass the number of this partition's step, starting at 1.")
