"""Temperature: a learned temperature of logits, for calibrated predictions."""

from __future__ import annotations

from torch import Tensor

from partnets.hyper.hyperparameter import Hyperparameter
from partnets.hyper.learned import Learned
from partnets.hyper.ranges import Range, positive


class Temperature(Hyperparameter):
    """A layer that divides logits by T (Guo et al. 2017), learned from held-out data.

    Put it at the end of a classifier. It learns directly, as it affects predictions.

    Args:
        temperature: the initial T.
        range: range of T.

    Attributes:
        temperature: hyper.Learned, a single value.

    Shapes:
        logits [batch, classes, ...]; returns the same shape.

    Raises:
        ValueError: temperature is outside the range.

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
