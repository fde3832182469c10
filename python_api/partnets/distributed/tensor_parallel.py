"""ColwiseParallel and RowwiseParallel: torch's tensor parallelism for partnets.Linear."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

import partkernels
from partkernels import Partition
from partnets.nn.cumulative import live_sum
from partnets.nn.linear import Linear
from partnets.nn.local_shard import local_partition


class ColwiseParallel(ParallelStyle):
    """torch's ColwiseParallel for a partnets.Linear, for parallelize_module: each rank has a part of the outputs.

    The input is whole on every rank; the output is this rank's part of the last dimension. The weight becomes a DTensor
    sharded along its rows, and each rank uses its rows of the map and regenerates its defaults.

    Raises:
        ValueError: the module is not a partnets.Linear, or there are more ranks than parts of its rows.

    Example:
        >>> import torch, torch.distributed as dist, partnets
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = partnets.partition(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), (0.5, 0.5))
        >>> plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        >>> model = parallelize_module(model, dist.init_device_mesh("cpu", (1,)), plan)
        >>> model[0].weight.placements, model[2].weight.placements
        ((Shard(dim=0),), (Shard(dim=1),))
        >>> model(torch.ones(3, 4)).shape
        torch.Size([3, 2])
        >>> dist.destroy_process_group()
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _sharded(module, device_mesh, _Colwise, weight=Shard(0), bias=Shard(-1))


class RowwiseParallel(ParallelStyle):
    """torch's RowwiseParallel for a partnets.Linear, for parallelize_module: each rank has a part of the inputs.

    The input is this rank's part of the last dimension; the output, summed over ranks, is whole on every rank. The
    weight becomes a DTensor sharded along its columns. Each rank's columns begin at a multiple of 64 if defaults are
    drawn, otherwise of 8, so in_features must be a multiple of this times the number of ranks.

    Raises:
        ValueError: the module is not a partnets.Linear, or its columns cannot be divided so.

    Example: see ColwiseParallel.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _sharded(module, device_mesh, _Rowwise, weight=Shard(1), bias=Replicate())


class _Sharded(Linear):
    """A partnets.Linear with DTensors as parameters."""

    mesh: DeviceMesh
    _shard: tuple[Partition, Partition] | None = None

    @property
    def shard(self) -> Partition:
        """Return the Partition of this rank's part of the weight."""
        if self._shard is None or self._shard[0] is not self.partition:  # after .to() or load_state_dict
            self._shard = self.partition, local_partition(self.partition, self.weight)
        return self._shard[1]

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        weight = self.weight.detach() if self.update is None else self.weight
        options = {"update": self.update, "bias": bias, "narrow": self.is_narrow}
        return partkernels.linear(x, weight.to_local(), self.shard, self.active, **options)

    def live_bias(self) -> Tensor | None:
        if self.bias is None:
            return None
        bias, live = self.bias.to_local(), (self.active, self.update)
        if "bias" not in self.partitions:
            return live_sum(bias, self.count, *live)
        partition = local_partition(self.partitions["bias"], self.bias)
        return partkernels.subnetwork_weight(bias, partition, live[0], update=live[1])


class _Colwise(_Sharded):
    def forward(self, input: Tensor) -> Tensor:
        # Each rank's outputs contribute a summand of the input's gradient.
        whole = DTensor.from_local(input, self.mesh, [Replicate()], run_check=False)
        return self.product(whole.to_local(grad_placements=[Partial()]), self.live_bias())


class _Rowwise(_Sharded):
    def forward(self, input: Tensor) -> Tensor:
        part = DTensor.from_local(self.product(input, bias=None), self.mesh, [Partial()], run_check=False)
        y = part.redistribute(placements=[Replicate()]).to_local()
        if self.bias is None:
            return y
        bias = self.live_bias()
        return y + (self.partition.row_units.take(bias, 0, self.active) if self.is_narrow else bias)


def _check_parts(partition: Partition, dim: int, ranks: int) -> None:
    """Raise ValueError, on every rank, unless each rank can have a part of the weight along this dimension."""
    size = partition.shape[dim]
    length = -(-size // ranks)  # as in torch.chunk
    if length * (ranks - 1) >= size:
        raise ValueError(
            f"{size} {('rows', 'columns')[dim]} of a weight are too few for {ranks} ranks in parts of {length}; use"
            " fewer ranks."
        )
    if ranks > 1:
        (partition.rows, partition.columns)[dim](length, size)  # raises if the second rank's part cannot begin there


def _sharded(module: nn.Module, mesh: DeviceMesh, kind: type[_Sharded], **placements: Placement) -> nn.Module:
    if type(module) is not Linear:
        raise ValueError(
            f"this style does not support a {type(module).__name__}; name a partnets.Linear in the plan, and use"
            " torch's styles for torch's layers."
        )
    _check_parts(module.partition, placements["weight"].dim, mesh.size())
    parameters = {
        name: nn.Parameter(distribute_tensor(parameter.detach(), mesh, [placements[name]]), parameter.requires_grad)
        for name, parameter in module.named_parameters()
    }
    for name, parameter in parameters.items():
        module.register_parameter(name, parameter)
    module.__class__, module.mesh = kind, mesh
    return module
