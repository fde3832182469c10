"""Defaults, format 1: the values of entries whose partition is not live; the same bits as in partkernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from partkernels_numpy import _library
from partkernels_numpy.arguments import check_scale, check_seed, matrix_shape, row_bytes
from partkernels_numpy.arrays import checked, checked_dtype, plain, weight_shape


class Defaults:
    """What every kind of defaults offers."""

    def values(self, shape: Sequence[int], dtype=np.float32) -> np.ndarray:
        """The defaults of a weight of this shape, of 1 to 4 dimensions, as every kernel regenerates them."""
        raise NotImplementedError

    def arguments(self) -> tuple[str, float, int, int]:
        """(kind, step, seed, stream): what a kernel is told of these defaults."""
        raise NotImplementedError

    @property
    def stored(self) -> np.ndarray | None:
        """The array that Stored keeps; None for the others, which need no memory."""
        return None


@dataclass(frozen=True)
class Zeros(Defaults):
    """Every default is 0: dead weights are pruned. The paper's choice where layers are normalised (App. D.2).

    Example:
        >>> Zeros().values((1, 2))
        array([[0., 0.]], dtype=float32)
    """

    def values(self, shape, dtype=np.float32):
        return np.zeros(weight_shape(shape), checked_dtype("dtype", dtype))

    def arguments(self):
        return "zeros", 0.0, 0, 0


class _Drawn(Defaults):
    """What Uniform and Normal share: values regenerated from (seed, stream, row, column)."""

    def __post_init__(self):
        for name in ("seed", "stream"):
            object.__setattr__(self, name, plain(getattr(self, name)))
            check_seed(name, getattr(self, name))

    def values(self, shape, dtype=np.float32):
        shape, dtype = weight_shape(shape), checked_dtype("dtype", dtype)
        rows, cols = matrix_shape(shape)
        # The weight of a subnetwork of which no entry is live: all are of partition 2.
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

    def __post_init__(self):
        check_scale("scale", self.scale)
        object.__setattr__(self, "scale", float(self.scale))
        super().__post_init__()

    def arguments(self):
        return "uniform", _library.round_to_bfloat16(float(np.float32(self.scale / 127.5))), self.seed, self.stream


@dataclass(frozen=True)
class Normal(_Drawn):
    """Approximately normal: the sum of four uniform bytes (Irwin-Hall), regenerated from a seed; no memory.

    Args:
        std: the standard deviation, in the weight's units, in [1e-30, 1e30]. No value is beyond 3.46 of them.
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

    def __post_init__(self):
        check_scale("std", self.std)
        object.__setattr__(self, "std", float(self.std))
        super().__post_init__()

    def arguments(self):
        return "normal", float(np.float32(self.std / math.sqrt(21845))), self.seed, self.stream


@dataclass(frozen=True, eq=False)
class Stored(Defaults):
    """Defaults that are kept: an array of the weight's shape, used as it is. For pretrained models, a copy of theirs.

    Args:
        array: of the weight's shape and dtype. Not copied, unless it is not aligned.

    Raises:
        TypeError: array is none that the kernels take.

    Example:
        >>> Stored(np.ones((1, 2))).values((1, 2), np.float64)
        array([[1., 1.]])
    """

    array: np.ndarray

    def __post_init__(self):
        object.__setattr__(self, "array", checked("the array of Stored", self.array))

    def values(self, shape, dtype=None):
        if tuple(shape) != self.array.shape:
            raise ValueError(
                f"shape {tuple(shape)} differs from that of the stored defaults, {self.array.shape}; pass the shape of"
                " the weight that they were stored for."
            )
        return self.array.astype(self.array.dtype if dtype is None else checked_dtype("dtype", dtype))

    def arguments(self):
        return "stored", 0.0, 0, 0

    @property
    def stored(self):
        return self.array
