"""PartitionedWeight: layers whose weight is divided entry by entry, by a packed map."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from partkernels import Defaults, Partition, Stored, Uniform, Zeros, subnetwork_weight
from partnets import saved_partition
from partnets.partitioned import Partitioned, as_class, check_parameters
from partnets.rows import total, with_rows

# The default's stream 0 fills the weight; the bias draws from another, so that the two are independent.
BIAS_STREAM = 1


def _drawn_seed() -> int:
    """A seed from torch's global generator: reproducible under torch.manual_seed, another for each layer."""
    return int(torch.randint((1 << 63) - 1, (), device="cpu"))


def _scale(weight: Tensor) -> float:
    """The half-width of torch's own initial weights and biases: 1 / sqrt(fan_in)."""
    return 1 / math.sqrt(weight[0].numel())


class PartitionedWeight(Partitioned):
    """A mixin for layers with a `weight` whose entries belong to C partitions and, maybe, a `bias` (Appendix I.2).

    Put it before torch's layer among the bases, name that layer in `ordinary`, and compute with `self.compute`, as
    partnets.Linear does.

    The bias of subnetwork k is b_1 + ... + b_k: row i of the parameter `bias` [C, out_features] is b_{i+1}. With C = 1
    the bias is [out_features] and the state_dict is that of torch's layer.

    Attributes:
        partition: of the weight.
        seed_defaults: how a layer starts that is drawn from a seed, if not as torch's; see partnets.partition.
        count, active, update: see Partitioned.
    """

    ordinary: type[nn.Module]
    partition: Partition | None = None
    seed_defaults: Defaults | Callable[..., Defaults] | None = None

    @property
    def count(self) -> int:
        """C, the number of partitions."""
        return self.partition.count

    def divide(self, proportions: Sequence[float], *, seed: int | None, defaults: str | Defaults) -> None:
        """Partitions this layer, which is still an ordinary one inside, at random (Appendix C).

        The weight starts at its defaults, except with 'zero', 'stored' or Zeros(), where it stays as it is. With 'seed'
        the bias is drawn anew from the seed as well, unless the layer has `seed_defaults` (see partnets.partition);
        otherwise it stays. It becomes b_1, and the others start at 0.
        """
        check_parameters(self, "weight", "bias")
        seed = _drawn_seed() if seed is None else seed
        resolved = self._resolve(defaults, seed)
        partition = Partition.random(self.weight.shape, proportions, seed=seed).to(self.weight.device)
        partition = dataclasses.replace(partition, defaults=resolved)

        bias = self.bias
        if bias is not None and defaults == "seed" and self.seed_defaults is None:
            drawn = Uniform(_scale(self.weight), seed, BIAS_STREAM).values((1, len(bias)), bias.dtype, bias.device)
            bias = nn.Parameter(drawn[0], requires_grad=bias.requires_grad)
        if bias is not None:
            bias = with_rows(bias, partition.count, neutral=0.0)
        if defaults == "seed" or not (isinstance(resolved, Zeros) or defaults == "stored"):
            values = resolved.values(self.weight.shape, self.weight.dtype, self.weight.device).clone()
            self.weight = nn.Parameter(values, requires_grad=self.weight.requires_grad)
        self.bias = bias
        self.partition, self.active, self.update = partition, partition.count, partition.count

    def _resolve(self, defaults: str | Defaults, seed: int) -> Defaults:
        if defaults == "seed":
            start = self.seed_defaults
            if start is None:
                return Uniform(_scale(self.weight), seed)
            made = start(seed=seed) if callable(start) else start
            if not isinstance(made, Defaults):
                raise ValueError(
                    f"seed_defaults of a {self.ordinary.__name__} is {start!r}; set it to partkernels.Zeros(), or to"
                    " what makes defaults of a seed, as functools.partial(partkernels.Normal, 0.1) does."
                )
            return made
        if defaults == "zero":
            return Zeros()
        if defaults == "stored":
            return Stored(self.weight.detach().clone())
        if isinstance(defaults, Defaults):
            return defaults
        raise ValueError(
            f"defaults={defaults!r}; pass 'seed', 'zero', 'stored', or one of partkernels' Zeros, Uniform, Normal,"
            " Stored."
        )

    @classmethod
    def from_ordinary(
        cls, layer: nn.Module, proportions: Sequence[float], *, seed: int | None = None, defaults="seed"
    ) -> PartitionedWeight:
        """A partitioned layer made of an ordinary one, which stays as it is; parameters that need no change are shared.

        Dtype, device, requires_grad, training mode and hooks are the layer's. See the class for the other arguments.

        Raises:
            ValueError: the proportions, seed or defaults are invalid, or the layer has other parameters than weight
                and bias.

        Example:
            >>> import partnets
            >>> partnets.Linear.from_ordinary(nn.Linear(4, 3), (0.5, 0.5), seed=0)
            Linear(in_features=4, out_features=3, bias=True, partitions=[6, 6])
        """
        new = as_class(layer, cls)
        new.divide(proportions, seed=seed, defaults=defaults)
        return new

    def entries(self, name, tensors, update):
        return (tensors, self.partition) if name == "weight" else super().entries(name, tensors, update)

    def to_ordinary(self, active: int) -> nn.Module:
        """torch's layer that computes what subnetwork `active` computes; shares nothing with this one."""
        new = as_class(self, self.ordinary)
        weight = subnetwork_weight(self.weight.detach(), self.partition, active)
        new.weight = nn.Parameter(weight, requires_grad=self.weight.requires_grad)
        if self.bias is not None:
            bias = total(self.bias, self.count, active, None)
            new.bias = nn.Parameter(bias, requires_grad=self.bias.requires_grad)
        return new

    def compute(self, kernel: Callable[..., Tensor], x: Tensor, **geometry) -> Tensor:
        """What the live subnetwork makes of x by partkernels.linear or conv2d; w_update and b_update get gradients."""
        # Where nothing learns, a detached weight has no gradient computed for its sake.
        weight = self.weight.detach() if self.update is None else self.weight
        bias = None if self.bias is None else total(self.bias, self.count, self.active, self.update)
        return kernel(x, weight, self.partition, self.active, update=self.update, bias=bias, **geometry)

    def reset_parameters(self) -> None:
        """The weight back to its defaults, or to torch's initial values if those are 0; b_1 to torch's, the rest 0."""
        super().reset_parameters()
        if self.partition is None:  # torch's own constructor calls this
            return
        with torch.no_grad():
            if not isinstance(self.partition.defaults, Zeros):
                place = {"row": self.partition.row, "col": self.partition.col}
                self.weight.copy_(self.partition.defaults.values(self.weight.shape, device=self.weight.device, **place))
            if self.bias is not None and self.count > 1:
                self.bias[1:] = 0

    def extra_repr(self) -> str:
        if self.partition is None:
            return super().extra_repr()
        sizes = self.count if self.partition.map.is_meta else self.partition.sizes()
        return f"{super().extra_repr()}, partitions={sizes}"

    def _apply(self, fn, recurse=True):
        partition = self.partition.map_tensors(fn)
        if self.partition.map.is_meta and not partition.map.is_meta:
            raise RuntimeError(
                f"this {type(self).__name__} is on the meta device, and its partition cannot be made of empty memory;"
                " use load_state_dict(..., assign=True), or construct the layer on its real device."
            )
        super()._apply(fn, recurse)
        self.partition = partition
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.count > 1:
            destination[prefix + "partition"] = saved_partition.to_plain(self.partition)

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing_keys, unexpected_keys, error_msgs):
        key = prefix + "partition"
        plain = state_dict.pop(key, None)  # a copy of ours; torch would call the key unexpected
        partition = self.partition
        if plain is not None:
            try:
                partition = saved_partition.from_plain(plain, tuple(self.weight.shape), self.count)
            except (TypeError, ValueError) as error:
                error_msgs.append(f"{key}: {error}")
                return
        elif self.count > 1 and prefix + "weight" in state_dict:
            error_msgs.append(
                f"{prefix}weight is that of an ordinary layer, without a partition; load it into the ordinary model"
                " and partition that with partnets.partition(..., defaults='stored')."
            )
            return
        elif self.count > 1:
            missing_keys.append(key)
        errors = len(error_msgs)
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if len(error_msgs) == errors:
            self.partition = partition.map_tensors(lambda tensor: tensor.to(self.weight.device, copy=True))
