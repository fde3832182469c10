"""Temperature: how sure predictions are, learned."""

from __future__ import annotations

from torch import Tensor

from partnets.hyper.hyperparameter import Hyperparameter
from partnets.hyper.learned import Learned
from partnets.hyper.ranges import Range, positive


class Temperature(Hyperparameter):
    """Divides logits by T (Guo et al. 2017), which learns from unseen data how sure predictions may be.

    Put it behind a classifier. It learns directly, as it has a part in predictions.

    Args:
        temperature: the initial T.
        range: of it.

    Attributes:
        temperature: hyper.Learned, a single value.

    Shapes:
        logits [batch, classes, ...] to the same.

    Raises:
        ValueError: temperature is not inside the range.

    Example:
        >>> import torch
        >>> Temperature(2.0)(torch.tensor([[2.0, 4.0]]))
        tensor([[1., 2.]], grad_fn=<DivBackward0>)
    """

    per_example = True

    def __init__(self, temperature: float = 1.0, *, range: Range = positive) -> None:
        super().__init__()
        range.check("temperature", temperature)
        self.temperature = Learned(temperature, range)

    def forward(self, logits: Tensor) -> Tensor:
        return logits / self.temperature(logits)
