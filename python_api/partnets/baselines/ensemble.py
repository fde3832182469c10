"""Ensemble: C networks in place of one network with C partitions."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from partkernels import Partition
from partnets.hyper import hyperparameters
from partnets.nn.partitioned import Partitioned
from partnets.utils.modules import frozen


class Ensemble(Partitioned):
    """Separate networks as partitions: subnetwork k is network k, trained on D_1:k (Section 5, "Partitioned (Ens.)").

    A partitioned network approximates it with a C-th of the memory. All functions for partitioned models accept it:
    partnets.subnetwork, lml, the optimisers, Trainer. Hyperparameters are shared: build the networks around the same
    module of partnets.hyper.

    Args:
        networks: torch modules with the same inputs and outputs.
        count: C; the number of networks if None. If there are fewer networks, later subnetworks are the last network
            and later partitions are empty.

    Attributes:
        networks: nn.ModuleList.
        active, update: as in a partitioned layer.

    Shapes:
        Those of the networks.

    Raises:
        ValueError: there is no network, there are more than count, or one is partitioned itself.

    Example:
        >>> import torch, partnets
        >>> from partnets import hyper
        >>> mask = hyper.InputMask(4)
        >>> model = Ensemble([nn.Sequential(mask, nn.Linear(4, 2)) for _ in range(3)])
        >>> chunks = partnets.chunk((torch.randn(20, 4), torch.randint(2, (20,))), (0.8, 0.1, 0.1))
        >>> len(partnets.Trainer(model, chunks, hyper=mask).fit(2).steps["k"])
        2
    """

    def __init__(self, networks: Sequence[nn.Module], count: int | None = None) -> None:
        super().__init__()
        count = len(networks) if count is None else count
        if not 1 <= len(networks) <= count:
            raise ValueError(f"there are {len(networks)} networks for {count} partitions; pass 1 to {count} networks.")
        if any(isinstance(module, Partitioned) for network in networks for module in network.modules()):
            raise ValueError("a network has partitions itself; pass torch modules, or train it without an Ensemble.")
        self.networks = nn.ModuleList(networks)
        # Pretrained networks may be in evaluation mode, which must not freeze them while the rest trains.
        is_training = any(network.training for network in networks)
        self.training = self.networks.training = is_training
        self.count, self.active, self.update = count, count, count

    def forward(self, *inputs, **named):
        network = self._network(self.active)
        learns = self.update is not None and self.update <= len(self.networks) and self._network(self.update) is network
        with frozen(parameter for _, parameter in (() if learns else self.owned())):
            return network(*inputs, **named)

    def owned(self) -> Iterator[tuple[str, nn.Parameter]]:
        shared = set(hyperparameters(self))
        return ((name, parameter) for name, parameter in self.named_parameters() if parameter not in shared)

    def entries(self, name: str, tensors: list[Tensor], update: int) -> tuple[list[Tensor], Partition | None] | None:
        return (tensors, None) if name.startswith(f"networks.{update - 1}.") else None

    def to_ordinary(self, active: int) -> nn.Module:
        return copy.deepcopy(self._network(active))

    def _network(self, active: int) -> nn.Module:
        return self.networks[min(active, len(self.networks)) - 1]
