"""AugerinoClient: federated averaging that learns weights and augmentations from the training loss (Table 4)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from partbench.baselines.augerino import bonus, only_affine
from partnets.federated.client import Client
from partnets.subnetworks.context import subnetwork
from partnets.utils.losses import summed


class AugerinoClient(Client):
    """A client of a dense network that learns ψ from the gradient of its training loss minus a bonus for width.

    Args:
        model: a partnets.Ensemble of one partition.
        data, number, **options: as for Client.
        hyper: one hyper.Affine, which has Augerino's widths.
        regularisation: the factor of ||width||_2 in the bonus; 0.01 in its paper (Benton et al. 2020).
        safe: whether the bonus gives no gradient while any width is 10 or more.

    Raises:
        ValueError: the model has more than one partition, or hyper is not one hyper.Affine; and as for Client.

    Example:
        >>> import torch, partnets
        >>> from partnets import hyper
        >>> augmentation = hyper.Affine(rotation=5.0)
        >>> network = nn.Sequential(augmentation, nn.Flatten(), nn.Linear(64, 10))
        >>> data = torch.rand(20, 1, 8, 8), torch.randint(10, (20,))
        >>> client = AugerinoClient(partnets.Ensemble([network]), data, hyper=augmentation)
        >>> update = client.train(client.vectors.read(), round=1)
        >>> list(update.values), list(update.gradients)
        (['w1.float32'], ['hyper.float32'])
    """

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        chunk: int = 1,
        number: int = 0,
        *,
        hyper: nn.Module | Iterable[nn.Module],
        regularisation: float = 0.01,
        safe: bool = True,
        **options,
    ) -> None:
        super().__init__(model, data, chunk, number, hyper=hyper, **options)
        self.regularisation, self.safe = regularisation, safe

    def _check_hyper(self) -> None:
        if self.vectors.num_partitions > 1:
            raise ValueError(
                f"the model has {self.vectors.num_partitions} partitions, but Augerino learns from all data; pass a"
                " dense network in partnets.Ensemble, or use Client for a partitioned one."
            )
        self.augmentation = only_affine(self.hyper.values())

    def _judging(self):
        return subnetwork(self.model, active=1, update=None)

    def _summed_loss(self, batch: Any, examples: int) -> tuple[Tensor, int]:
        loss, counted = summed(self.loss, *self._computed(batch), examples)
        return loss - counted * self.regularisation * bonus(self.augmentation, self.safe).to("cpu"), counted
