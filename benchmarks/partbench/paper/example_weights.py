"""ExampleWeights: a training loss with a learned weight for each example."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partnets import hyper
from partnets.hyper.learned import Precise
from partnets.hyper.training_loss import check_numbers, check_one_subnetwork

# Hidden units of the network that maps losses to weights (Shu et al. 2019).
HIDDEN = 100


class ExampleWeights(Precise, hyper.TrainingLoss):
    """A training loss with a learned weight for each example, for data with many wrong labels.

    The weight is either computed from the example's loss by a small network (Shu et al. 2019), the same for all data,
    or a separate number for each example (Ren et al. 2018). In the second case, the data must include each example's
    index: (x, (targets, index)). Numbers of the last chunk keep their initial values: it trains only the last
    partition, which no later chunk judges. In each batch the mean weight is 1.

    Args:
        examples: the number of examples, each with a separate number; None for a network.

    Attributes:
        network: maps losses [batch, 1] to the logits of their weights, with one hidden layer of 100 units; or None.
        scores: the logits of the weights, a parameter [examples], or None.

    Shapes:
        output [batch, ...] and targets, or (targets, index int64 [batch]); returns the losses of the examples that are
        not ignored, a vector.

    Raises:
        ValueError: examples is below 1, or see TrainingLoss.losses.

    Example:
        >>> weights = ExampleWeights(examples=5)
        >>> logits, y, index = torch.zeros(2, 3), torch.tensor([0, 2]), torch.tensor([4, 1])
        >>> weights(logits, (y, index))
        tensor([1.0986, 1.0986], grad_fn=<MulBackward0>)
        >>> weights.values()
        {'lowest weight': 0.5, 'highest weight': 0.5}
    """

    leaves_out = True

    def __init__(self, examples: int | None = None) -> None:
        super().__init__(F.cross_entropy)
        if examples is not None and examples < 1:
            raise ValueError(f"examples={examples}; pass a number of at least 1, or None for a network.")
        self.scores = None if examples is None else nn.Parameter(torch.zeros(examples))
        self.detaches = examples is None  # detaches the losses, the network's input
        self.network = None
        if examples is None:
            self.network = nn.Sequential(nn.Linear(1, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))

    def targets(self, y: Any) -> Any:
        return y if self.scores is None else y[0]

    def trained(self, output: Any, y: Any) -> Tensor:
        check_one_subnetwork()
        losses, counted = self.losses(output, y), self.counted(output, y)
        counted = slice(None) if counted is None else counted
        if self.scores is None:
            losses = losses[counted]
            weights = self.network(losses.detach()[:, None].to(self._parameter().dtype))[:, 0].sigmoid()
        else:
            check_numbers("indices", y[1], losses, len(self.scores))
            losses, indices = losses[counted], y[1][counted]
            weights = self.scores[indices].sigmoid()
        return losses * (weights / weights.mean())

    def values(self) -> dict[str, float]:
        """Return the lowest and the highest weight of the examples, or the weights of losses 0 and 5."""
        if self.scores is not None:
            ends = torch.stack([self.scores.min(), self.scores.max()]).sigmoid().tolist()
            return dict(zip(("lowest weight", "highest weight"), ends, strict=True))
        with torch.no_grad():
            low, high = self.network(self._parameter().new_tensor([[0.0], [5.0]]))[:, 0].sigmoid().tolist()
        return {"weight of loss 0": low, "weight of loss 5": high}

    def _parameter(self) -> nn.Parameter:
        """Return a parameter of the network, for its dtype and device."""
        return next(self.network.parameters())
