"""A layer to be measured, with its tensors: the set-up shared by all suites."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partkernels as pk
import partnets
from partkernels.arguments import bits_for
from partnets.subnetworks.assignment import set_partition

T = TypeVar("T")
DEFAULTS = ("zeros", "uniform", "normal", "stored")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Partitioning:
    """A way to partition weights: the proportions of C partitions, and one of DEFAULTS for inactive weights."""

    proportions: tuple[float, ...] = (0.8, 0.1, 0.1)
    defaults: str = "uniform"

    @property
    def num_partitions(self) -> int:
        return len(self.proportions)

    def case(self) -> dict[str, str | int]:
        """Return the entries that identify this partitioning in results."""
        bits = bits_for(self.num_partitions)
        proportions = "/".join(f"{p:g}" for p in self.proportions)
        if len(set(self.proportions)) == 1:
            proportions = f"1/{self.num_partitions} each"
        return {"partitions": self.num_partitions, "proportions": proportions, "bits": bits, "defaults": self.defaults}

    def values(self, weight: Tensor, seed: int) -> pk.Defaults:
        """Return defaults for a weight, distributed like torch's initial weights."""
        scale = 1 / math.sqrt(weight[0].numel())
        return {
            "zeros": lambda: pk.Zeros(),
            "uniform": lambda: pk.Uniform(scale, seed),
            "normal": lambda: pk.Normal(scale / math.sqrt(3), seed),
            "stored": lambda: pk.Stored(pk.Uniform(scale, seed).values(weight.shape, weight.dtype, weight.device)),
        }[self.defaults]()


# The paper's proportions for MNIST and CIFAR-10 (Appendix I.4).
THREE = Partitioning()


@dataclass(frozen=True)
class Layer:
    """A linear layer or a convolution without bias, with the shape of its batch.

    Attributes:
        x: [rows, in_features] or [batch, channels, height, width].
        weight: [out_features, in_features] or [out_channels, in_channels / groups, height, width].
        stride, padding, dilation, groups: of a convolution.
    """

    x: tuple[int, ...]
    weight: tuple[int, ...]
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    groups: int = 1
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU

    @property
    def operator(self) -> str:
        return "linear" if len(self.weight) == 2 else "conv2d"

    @property
    def geometry(self) -> dict[str, int]:
        """Return the arguments of torch's convolution."""
        if self.operator == "linear":
            return {}
        return {"stride": self.stride, "padding": self.padding, "dilation": self.dilation, "groups": self.groups}

    @cached_property
    def y(self) -> tuple[int, ...]:
        """Return the output's shape."""
        meta = [torch.empty(shape, device="meta") for shape in (self.x, self.weight)]
        return tuple(self.dense(*meta).shape)

    @property
    def shape(self) -> str:
        """Return M×N×K of a linear layer; for a convolution, input, weight and non-default geometry.

        Example:
            >>> Layer((32, 512), (256, 512)).shape
            '32×256×512'
            >>> Layer((8, 3, 32, 32), (16, 3, 3, 3), padding=1).shape
            '8×3×32×32, 16×3×3×3, padding 1'
        """
        if self.operator == "linear":
            return f"{self.x[0]}×{self.weight[0]}×{self.weight[1]}"
        sizes = ["×".join(map(str, shape)) for shape in (self.x, self.weight)]
        usual = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
        return ", ".join(sizes + [f"{name} {n}" for name, n in self.geometry.items() if n != usual[name]])

    @property
    def flops(self) -> int:
        """Return the floating-point operations of the forward pass, which each gradient takes as well."""
        return 2 * math.prod(self.y) * math.prod(self.weight[1:])

    @property
    def bytes(self) -> int:
        """Return the fewest bytes that the forward pass or either gradient can move: each of its three tensors once."""
        return sum(map(math.prod, (self.x, self.weight, self.y))) * self.dtype.itemsize

    def dense(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Call PyTorch's dense operator."""
        return F.linear(x, weight, bias) if self.operator == "linear" else F.conv2d(x, weight, bias, **self.geometry)

    def dense_grad_input(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Compute the gradient of x as PyTorch's backward pass does."""
        is_linear = self.operator == "linear"
        return grad @ weight if is_linear else nn.grad.conv2d_input(self.x, weight, grad, **self.geometry)

    def dense_grad_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        """Compute the gradient of the weight as PyTorch's backward pass does."""
        is_linear = self.operator == "linear"
        return grad.t() @ x if is_linear else nn.grad.conv2d_weight(x, self.weight, grad, **self.geometry)


class Tensors:
    """Operands of a layer: x, weight, bias, the output's gradient, and the partition of the weight.

    Args:
        layer, partitioning: shapes, dtype and device; and how the weight is partitioned.
        seed: of all random values.
    """

    def __init__(self, layer: Layer, partitioning: Partitioning, seed: int) -> None:
        generator = torch.Generator(layer.device).manual_seed(seed)

        def normal(shape: Sequence[int], scale: float = 1.0) -> Tensor:
            values = torch.randn(shape, generator=generator, device=layer.device) * scale
            return values.to(layer.dtype)

        self.layer, self.partitioning, self.seed = layer, partitioning, seed
        self._made: dict[str, object] = {}
        self.x, self.grad = normal(layer.x), normal(layer.y)
        self.weight = normal(layer.weight, 1 / math.sqrt(math.prod(layer.weight[1:])))
        self.bias = normal(layer.weight[:1])

    def once(self, name: str, make: Callable[[], T]) -> T:
        """Return the first result of make() under a name; so a workload's peers are checked against the same truth."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    @cached_property
    def partition(self) -> pk.Partition:
        """Return the weight's partition with its defaults."""
        defaults = self.partitioning.values(self.weight, self.seed)
        partition = pk.Partition.random(self.layer.weight, self.partitioning.proportions, seed=self.seed)
        return dataclasses.replace(partition.to(self.layer.device), defaults=defaults)

    @cached_property
    def ids(self) -> Tensor:
        """Return the partition of each weight, 1..C, in a byte a weight."""
        return self.partition.ids()

    @cached_property
    def defaults(self) -> Tensor:
        """Return the default values that replace inactive weights, as a second tensor of the weight's shape."""
        return self.partition.defaults.values(self.layer.weight, self.layer.dtype, self.layer.device).clone()

    @cached_property
    def module(self) -> nn.Module:
        """Return torch's layer with this weight and partition; the bias belongs to partition 1."""
        # skip_init: the initial weights are not used, and drawing them takes a second for the largest layers.
        new = partial(nn.utils.skip_init, device=self.layer.device, dtype=self.layer.dtype)
        if self.layer.operator == "linear":
            out_features, in_features = self.layer.weight
            module = new(nn.Linear, in_features, out_features)
        else:
            out_channels, in_channels, *kernel = self.layer.weight
            in_channels *= self.layer.groups
            module = new(nn.Conv2d, in_channels, out_channels, kernel, **self.layer.geometry)
        defaults = self.partitioning.values(self.weight, self.seed)
        with torch.no_grad():
            module.weight.copy_(self.weight)
            module.bias.copy_(self.bias)
            partnets.partition(module, self.partitioning.proportions, seed=self.seed, defaults=defaults)
            if self.partitioning.num_partitions > 1:
                set_partition(module, "weight", self.partition)
            module.weight.copy_(self.weight)
        return module
