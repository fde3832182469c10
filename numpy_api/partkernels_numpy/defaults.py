"""Defaults, format 1: the values of entries in inactive partitions, with the same bits as in partkernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from partkernels_numpy import _library
from partkernels_numpy.arguments import check_scale, check_seed, matrix_shape, row_bytes
from partkernels_numpy.arrays import checked, checked_dtype, plain, weight_shape


class Defaults:
    """Base class of all kinds of defaults."""

    def values(self, shape: Sequence[int], dtype: DTypeLike = np.float32) -> np.ndarray:
        """Return the defaults of a weight of this shape, of 1 to 4 dimensions, as the kernels regenerate them."""
        raise NotImplementedError

    def arguments(self) -> tuple[str, float, int, int]:
        """Return the kernels' arguments: (kind, step, seed, stream)."""
        raise NotImplementedError

    @property
    def stored(self) -> np.ndarray | None:
        """The array of Stored; None for the other kinds, which need no memory."""
        return None


@dataclass(frozen=True)
class Zeros(Defaults):
    """Defaults of 0: inactive weights are pruned. The paper's choice for normalised layers (App. D.2).

    Example:
        >>> Zeros().values((1, 2))
        array([[0., 0.]], dtype=float32)
    """

    def values(self, shape: Sequence[int], dtype: DTypeLike = np.float32) -> np.ndarray:
        return np.zeros(weight_shape(shape), checked_dtype("dtype", dtype))

    def arguments(self) -> tuple[str, float, int, int]:
        return "zeros", 0.0, 0, 0


class _Drawn(Defaults):
    """Base class of Uniform and Normal: values regenerated from (seed, stream, row, column)."""

    def __post_init__(self) -> None:
        for name in ("seed", "stream"):
            object.__setattr__(self, name, plain(getattr(self, name)))
            check_seed(name, getattr(self, name))

    def values(self, shape: Sequence[int], dtype: DTypeLike = np.float32) -> np.ndarray:
        shape, dtype = weight_shape(shape), checked_dtype("dtype", dtype)
        rows, cols = matrix_shape(shape)
        # The weight of a subnetwork without active entries: all belong to partition 2.
        dead = _library.Partition(np.full((rows, row_bytes(cols, 1)), 0xFF, np.uint8), 2, *self.arguments(), None)
        out = np.empty(shape, dtype)
        _library.subnetwork_weight(np.broadcast_to(np.zeros((), dtype), shape), dead, 1, out)
        return out


@dataclass(frozen=True)
class Uniform(_Drawn):
    """256 evenly spaced levels in [-scale, scale], regenerated from a seed; no memory.

    Each value is the nearest bfloat16 to +-(m + 1/2) * u, with m in 0..127 and u = bfloat16(scale / 127.5).

    Args:
        scale: the half-width, in the weight's units, in [1e-30, 1e30].
        seed, stream: integers in [0, 2**63); distinct streams of one seed are independent.

    Raises:
        ValueError: scale, seed or stream is out of range.

    Example:
        >>> bool(np.abs(Uniform(0.5, seed=1).values((2, 3))).max() <= 0.502)
        True
    """

    scale: float
    seed: int
    stream: int = 0

    def __post_init__(self) -> None:
        check_scale("scale", self.scale)
        object.__setattr__(self, "scale", float(self.scale))
        super().__post_init__()

    def arguments(self) -> tuple[str, float, int, int]:
        return "uniform", _library.round_to_bfloat16(float(np.float32(self.scale / 127.5))), self.seed, self.stream


@dataclass(frozen=True)
class Normal(_Drawn):
    """Approximately normal: the sum of four uniform bytes (Irwin-Hall), regenerated from a seed; no memory.

    Args:
        std: the standard deviation, in the weight's units, in [1e-30, 1e30]. No value is beyond 3.46 std.
        seed, stream: integers in [0, 2**63); distinct streams of one seed are independent.

    Raises:
        ValueError: std, seed or stream is out of range.

    Example:
        >>> bool(0.9 < Normal(1.0, seed=1).values((100, 100)).std() < 1.1)
        True
    """

    std: float
    seed: int
    stream: int = 0

    def __post_init__(self) -> None:
        check_scale("std", self.std)
        object.__setattr__(self, "std", float(self.std))
        super().__post_init__()

    def arguments(self) -> tuple[str, float, int, int]:
        return "normal", float(np.float32(self.std / math.sqrt(21845))), self.seed, self.stream


@dataclass(frozen=True, eq=False)
class Stored(Defaults):
    """Defaults from an array of the weight's shape; for pretrained models, a copy of the weight.

    Args:
        array: the defaults, in the weight's shape and dtype. Copied only if it is not aligned.

    Raises:
        TypeError: the kernels do not support the array's type or dtype.

    Example:
        >>> Stored(np.ones((1, 2))).values((1, 2), np.float64)
        array([[1., 1.]])
    """

    array: np.ndarray

    def __post_init__(self) -> None:
        object.__setattr__(self, "array", checked("the array of Stored", self.array))

    def values(self, shape: Sequence[int], dtype: DTypeLike = None) -> np.ndarray:
        if tuple(shape) != self.array.shape:
            raise ValueError(
                f"shape {tuple(shape)} differs from the shape of the stored defaults, {self.array.shape}; pass the"
                " shape of the weight for which they were stored."
            )
        return self.array.astype(self.array.dtype if dtype is None else checked_dtype("dtype", dtype))

    def arguments(self) -> tuple[str, float, int, int]:
        return "stored", 0.0, 0, 0

    @property
    def stored(self) -> np.ndarray:
        return self.array
