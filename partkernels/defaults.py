"""Defaults, format 1: the values of inactive entries.

Zeros, Uniform and Normal need no memory: each value is a pure function of (seed, stream, row, column) and a bfloat16
number for any dtype of the weight, so that casts do not change it. Stored keeps a tensor.
The C++ and CUDA counterpart is csrc/include/partkernels/defaults.h.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partkernels.arguments import check_scale, check_seed, matrix_shape, row_bytes
from partkernels.backend import dispatch
from partkernels.backend.reference import operators as reference
from partkernels.formats.packed_map import from_matrix


class Defaults:
    """The interface of all kinds of defaults."""

    def values(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        *,
        row: int = 0,
        col: int = 0,
    ) -> Tensor:
        """Return the defaults of a weight of this shape, bit for bit as every kernel regenerates them.

        Args:
            shape: the weight's shape, [rows, ...]; columns run with dimension 1 innermost (see packed_map).
            dtype: the result's dtype.
            device: the result's device.
            row, col: for a shard, the position of its first entry in the full weight (see Partition); col must be a
                multiple of 64.
        """
        raise NotImplementedError

    def arguments(self) -> tuple[str, float, int, int]:
        """Return (kind, step, seed, stream), the operators' arguments for these defaults."""
        raise NotImplementedError

    @property
    def stored(self) -> Tensor | None:
        """The tensor of Stored; None for the other kinds, which need no memory."""
        return None

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Defaults:
        """Return these defaults with each tensor replaced by function(tensor)."""
        return self


@dataclass(frozen=True)
class Zeros(Defaults):
    """Every default is 0: inactive weights are pruned. The paper's choice for normalised layers (App. D.2).

    Example:
        >>> Zeros().values((2, 2))
        tensor([[0., 0.],
                [0., 0.]])
    """

    def values(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        *,
        row: int = 0,
        col: int = 0,
    ) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def arguments(self) -> tuple[str, float, int, int]:
        return "zeros", 0.0, 0, 0


class _Drawn(Defaults):
    """The base of Uniform and Normal. Values are regenerated from (seed, stream, row, column)."""

    def __post_init__(self) -> None:
        check_seed("seed", self.seed)
        check_seed("stream", self.stream)

    def values(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        *,
        row: int = 0,
        col: int = 0,
    ) -> Tensor:
        device = torch.get_default_device() if device is None else torch.device(device)
        backend = dispatch.maker(device)
        if backend is reference:
            return reference.drawn(*self.arguments(), row, col, tuple(shape), dtype, device)
        rows, cols = matrix_shape(tuple(shape))
        # Materialise a subnetwork without active entries: every row shares one map, which has only partition 2.
        weight = torch.empty(1, 1, dtype=torch.bfloat16, device=device).expand(rows, cols)  # every default is bfloat16
        dead = torch.full((1, row_bytes(cols, bits=1)), 0xFF, dtype=torch.uint8, device=device).expand(rows, -1)
        matrix = backend.subnetwork_weight(weight, 1, dead, None, 2, *self.arguments(), row, col)
        return from_matrix(matrix, tuple(shape)).to(dtype).contiguous()


@dataclass(frozen=True)
class Uniform(_Drawn):
    """256 evenly spaced levels in [-scale, scale], regenerated from a seed; no memory.

    Each value is the nearest bfloat16 to +-(m + 1/2) * u, with m in 0..127 and u = bfloat16(scale / 127.5).

    Args:
        scale: the half-width, in the weight's units, in [1e-30, 1e30].
        seed, stream: integers in [0, 2**63); different streams of one seed are independent.

    Raises:
        ValueError: scale, seed or stream is out of range.

    Example:
        >>> Uniform(0.5, seed=1).values((2, 3)).abs().max() <= 0.502
        tensor(True)
    """

    scale: float
    seed: int
    stream: int = 0

    def __post_init__(self) -> None:
        check_scale("scale", self.scale)
        object.__setattr__(self, "scale", float(self.scale))  # a numpy scalar would be divided in fewer bits
        super().__post_init__()
        # Only here is u rounded to float32 and then to bfloat16: kernels never see the scale.
        step = torch.tensor(self.scale / 127.5, dtype=torch.float32, device="cpu").bfloat16()
        object.__setattr__(self, "step", step.item())

    def arguments(self) -> tuple[str, float, int, int]:
        return "uniform", self.step, self.seed, self.stream


@dataclass(frozen=True)
class Normal(_Drawn):
    """Approximately normal: the scaled sum of four uniform bytes (Irwin-Hall), regenerated from a seed; no memory.

    Args:
        std: the standard deviation, in the weight's units, in [1e-30, 1e30]. Values are at most 3.46 std from 0.
        seed, stream: integers in [0, 2**63); different streams of one seed are independent.

    Raises:
        ValueError: std, seed or stream is out of range.

    Example:
        >>> 0.9 < Normal(1.0, seed=1).values((100, 100)).std() < 1.1
        tensor(True)
    """

    std: float
    seed: int
    stream: int = 0

    def __post_init__(self) -> None:
        check_scale("std", self.std)
        object.__setattr__(self, "std", float(self.std))
        super().__post_init__()
        # 21845 is the variance of a sum of four bytes.
        step = torch.tensor(self.std / math.sqrt(21845), dtype=torch.float32, device="cpu")
        object.__setattr__(self, "step", step.item())

    def arguments(self) -> tuple[str, float, int, int]:
        return "normal", self.step, self.seed, self.stream


@dataclass(frozen=True, eq=False)
class Stored(Defaults):
    """Defaults that are stored in a tensor of the weight's shape and used unchanged, for pretrained models.

    Args:
        tensor: floating point, the weight's shape. Not copied.

    Raises:
        TypeError: tensor is not a dense floating-point tensor.

    Example:
        >>> Stored(torch.ones(2, 2)).values((2, 2), torch.float64)
        tensor([[1., 1.],
                [1., 1.]], dtype=torch.float64)
    """

    tensor: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, Tensor) or not self.tensor.is_floating_point():
            given = getattr(self.tensor, "dtype", type(self.tensor).__name__)
            raise TypeError(f"Stored got {given}; pass a floating-point tensor of the weight's shape.")
        if self.tensor.layout != torch.strided:
            raise TypeError(f"Stored got a tensor in {self.tensor.layout}; pass a dense one, such as its to_dense().")
        object.__setattr__(self, "tensor", self.tensor.detach())

    def values(
        self,
        shape: Sequence[int],
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        *,
        row: int = 0,
        col: int = 0,
    ) -> Tensor:
        """Return the stored tensor, cast to dtype and moved to device if given; a shard stores its part."""
        if tuple(shape) != tuple(self.tensor.shape):
            raise ValueError(
                f"shape {tuple(shape)} differs from the stored defaults' shape {tuple(self.tensor.shape)};"
                " pass the shape of the weight that they were stored for."
            )
        return self.tensor.to(device=device, dtype=dtype)

    def arguments(self) -> tuple[str, float, int, int]:
        return "stored", 0.0, 0, 0

    @property
    def stored(self) -> Tensor:
        return self.tensor

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Stored:
        return Stored(function(self.tensor))
