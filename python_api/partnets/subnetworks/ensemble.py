"""Ensemble: C networks in place of one network with C partitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from partnets.hyper import hyperparameters
from partnets.subnetworks.state import ATTRIBUTE, PartitionState, partitioned_modules, state_of


class Ensemble(nn.Module):
    """Separate networks as partitions: subnetwork k is network k, trained on D_1:k (Section 5, "Partitioned (Ens.)").

    A partitioned network approximates it with a C-th of the memory. All functions for partitioned models accept it:
    partnets.subnetwork, lml, the optimisers, Trainer. Hyperparameters are shared: build the networks around the same
    module of partnets.hyper.

    Args:
        networks: torch modules with the same inputs and outputs.
        num_partitions: C; the number of networks if None. If there are fewer networks, later subnetworks are the last
            network and later partitions are empty.

    Attributes:
        networks: nn.ModuleList.

    Shapes:
        Those of the networks.

    Raises:
        ValueError: there is no network, there are more than num_partitions, one is partitioned itself, or two share a
            trainable parameter or batch normalisation.

    Example:
        >>> import torch, partnets
        >>> from partnets import hyper
        >>> mask = hyper.InputMask(4)
        >>> model = Ensemble([nn.Sequential(mask, nn.Linear(4, 2)) for _ in range(3)])
        >>> chunks = partnets.chunk((torch.randn(20, 4), torch.randint(2, (20,))), (0.8, 0.1, 0.1))
        >>> len(partnets.Trainer(model, chunks, hyper=mask).fit(2).steps["k"])
        2
    """

    def __init__(self, networks: Sequence[nn.Module], num_partitions: int | None = None) -> None:
        super().__init__()
        num_partitions = len(networks) if num_partitions is None else num_partitions
        if not 1 <= len(networks) <= num_partitions:
            raise ValueError(
                f"there are {len(networks)} networks for {num_partitions} partitions; pass 1 to"
                f" {num_partitions} networks."
            )
        if any(partitioned_modules(network) for network in networks):
            raise ValueError("a network has partitions itself; pass torch modules, or train it without an Ensemble.")
        _check_apart(networks)
        self.networks = nn.ModuleList(networks)
        # Pretrained networks may be in evaluation mode, which must not freeze them while the rest trains.
        is_training = any(network.training for network in networks)
        self.training = self.networks.training = is_training
        shared = set(hyperparameters(self))
        for k, network in enumerate(networks, 1):
            for module in network.modules():
                own = [name for name, p in module._parameters.items() if p is not None and p not in shared]
                if own or isinstance(module, _NormBase):  # norms without parameters follow their network's batches
                    state = PartitionState(num_partitions)
                    state.wholes = dict.fromkeys(own, k)
                    setattr(module, ATTRIBUTE, state)
        setattr(self, ATTRIBUTE, PartitionState(num_partitions))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self._network(state_of(self).active)(*inputs, **named)

    def merged_subnetwork(self, active: int) -> nn.Module:
        """Return the network that subnetwork `active` is."""
        return self._network(active)

    def _network(self, active: int) -> nn.Module:
        return self.networks[min(active, len(self.networks)) - 1]


def _check_apart(networks: Sequence[nn.Module]) -> None:
    """Raise ValueError if two networks share a part that learns: the first would learn from the second one's chunks."""
    found: dict[object, int] = {}
    for k, network in enumerate(networks, 1):
        shared = set(hyperparameters(network))
        learning = [(p, f"the parameter {name}") for name, p in network.named_parameters() if p.requires_grad]
        norms = [
            (one, "batch normalisation") for one in network.modules() if isinstance(one, _NormBase) and one.training
        ]
        for part, what in (*learning, *norms):
            if part not in shared and (first := found.setdefault(part, k)) != k:
                raise ValueError(
                    f"networks {first} and {k} share {what}, which would learn from chunk {k} in network {first} too;"
                    " copy it, or freeze it and set it to evaluation mode."
                )
