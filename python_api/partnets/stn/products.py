"""The products of linear layers, convolutions and tables with a weight, as `respond` computes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from partkernels.operators import dense
from partnets.stn.response import Product

# With at least this many positions in an example, such as a sequence's, the example's own weight is formed: this costs
# as much as the product with some twenty positions, and saves one product forward, one for dx and two for parameters.
MERGED_POSITIONS = 48
# Bytes of examples' own weights at a time, where they are multiplied as a batch.
MERGED_BYTES = 64 << 20
# Examples' own kernels are formed if a row of a kernel has at most this many entries per output position: then one
# convolution with a group for each example costs less than two of the batch.
MERGED_ENTRIES = 2.5
# Bytes of kernels at a time: they are read three times, and a core's cache holds this many.
MERGED_KERNEL_BYTES = 1 << 20


class Matmul(Product):
    """The product x W^T for x [batch, ..., in_features]."""

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        return dense.linear(x, weight)

    def add(self, y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        if dense.uses_cpp(x, weight):
            return y.add_(dense.linear(x, weight))
        y.view(-1, len(weight)).addmm_(x.flatten(0, -2), weight.t())  # fuses product and addition
        return y

    def gradients(
        self, grad: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        return (
            dense.linear_grad_input(grad, weight) if needs[0] else None,
            dense.linear_grad_weight(grad, x) if needs[1] else None,
        )

    def at_a_time(self, x: Tensor, weight: Tensor) -> int:
        positions = x.shape[1:-1].numel()
        if positions < MERGED_POSITIONS or len(x) == 0:
            return 0
        # On CPUs a batch of products takes 1.2 to 2.1 times F.linear's time, successive products 1.06 to 1.23 times.
        return 1 if x.device.type == "cpu" else max(1, MERGED_BYTES // (weight.numel() * weight.element_size()))

    def each(self, x: Tensor, weights: Tensor) -> Tensor:
        if len(x) == 1:
            return dense.linear(x, weights[0])
        return (x.flatten(1, -2) @ weights.mT).view(*x.shape[:-1], weights.shape[1])

    def each_gradients(
        self, grad: Tensor, x: Tensor, weights: Tensor, needs: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        if len(x) == 1:
            grad_x, grad_weight = self.gradients(grad, x, weights[0], needs)
            return grad_x, None if grad_weight is None else grad_weight[None]
        flat = grad.flatten(1, -2)
        return (flat @ weights).view(x.shape) if needs[0] else None, flat.mT @ x.flatten(1, -2) if needs[1] else None


MATMUL = Matmul()


@dataclass(frozen=True)
class Convolution(Product):
    """The product torch.convolution of x [batch, channels, *size]."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    rows_dim = 1

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.convolution(x, weight, None, *self._geometry(self.groups))

    def gradients(
        self, grad: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        return self._gradients(grad, x, weight, needs, self.groups)

    def at_a_time(self, x: Tensor, weight: Tensor) -> int:
        sizes = zip(x.shape[2:], self.padding, self.dilation, weight.shape[2:], self.stride, strict=True)
        positions = 1
        for size, padding, dilation, kernel, stride in sizes:
            positions *= (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        if len(x) == 0 or weight[0].numel() > MERGED_ENTRIES * positions:
            return 0
        return max(1, MERGED_KERNEL_BYTES // (weight.numel() * weight.element_size()))

    def each(self, x: Tensor, weights: Tensor) -> Tensor:
        y = torch.convolution(_as_one(x), weights.flatten(0, 1), None, *self._geometry(self.groups * len(x)))
        return y.reshape(len(x), -1, *y.shape[2:])

    def each_gradients(
        self, grad: Tensor, x: Tensor, weights: Tensor, needs: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        groups = self.groups * len(x)
        grad_x, grad_weights = self._gradients(_as_one(grad), _as_one(x), weights.flatten(0, 1), needs, groups)
        return (
            None if grad_x is None else grad_x.reshape(x.shape),
            None if grad_weights is None else grad_weights.reshape(weights.shape),
        )

    def _geometry(self, groups):
        return self.stride, self.padding, self.dilation, False, (0,) * len(self.stride), groups

    def _gradients(self, grad, x, weight, needs, groups):
        mask = [*needs, False]
        found = torch.ops.aten.convolution_backward(grad, x, weight, None, *self._geometry(groups), mask)
        return found[0], found[1]


def _as_one(x: Tensor) -> Tensor:
    """Reshape a batch to one example that has all examples' channels."""
    return x.reshape(1, -1, *x.shape[2:])


@dataclass(frozen=True)
class Lookup(Product):
    """The product that looks up rows of a table by their indices."""

    padding_idx: int | None
    scale_grad_by_freq: bool

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.embedding(x, weight, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq)

    def gradients(
        self, grad: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        if not needs[1]:
            return None, None
        padding = -1 if self.padding_idx is None else self.padding_idx
        backward = torch.ops.aten.embedding_dense_backward
        return None, backward(grad, x, len(weight), padding, self.scale_grad_by_freq)
