"""InputMask: a mask of input features with learned probabilities."""

from __future__ import annotations

from torch import Tensor, nn

from partnets.hyper import ranges
from partnets.hyper.concrete import check_temperature, concrete
from partnets.hyper.hyperparameter import Hyperparameter
from partnets.hyper.learned import Learned, check_real
from partnets.hyper.tracing import traced
from partnets.utils.checks import check_at_least


class InputMask(Hyperparameter):
    """A random mask of the input, with one probability for each feature (Section 5, mask learning).

    In training, each example draws a separate mask from the concrete relaxation of the Bernoulli distribution
    (Maddison et al. 2016), z = sigmoid((logit(p) + logit(u)) / temperature) with u ~ U(0, 1). The gradient reaches p
    through the mask. In evaluation mode the mask is its mean, p, as in dropout; predictions and L_ML are deterministic.
    values() returns the probability of each feature, under its index.

    Args:
        features: the number of features, the last dimension of x.
        probability: the initial p of each feature, in (0, 1).
        temperature: temperature of the relaxation; the closer it is to 0, the closer the mask is to {0, 1}.

    Attributes:
        probability: hyper.Learned, [features].
        logits: its unconstrained parameter, logit(p), [features].

    Shapes:
        x [..., features], floating point; returns the same shape.

    Raises:
        ValueError: features is below 1, probability is not in (0, 1), temperature is not positive, or x has another
            number of features.

    Example:
        >>> import torch
        >>> mask = InputMask(3, probability=0.75).eval()
        >>> mask(torch.ones(1, 3))
        tensor([[0.7500, 0.7500, 0.7500]], grad_fn=<MulBackward0>)
    """

    per_example = True

    def __init__(self, features: int, *, probability: float = 0.5, temperature: float = 0.1) -> None:
        super().__init__()
        check_at_least(1, features=features)
        ranges.probability.check("probability", probability)
        check_temperature(temperature)
        self.temperature = temperature
        names = [str(i) for i in range(features)]
        self.probability = Learned([probability] * features, ranges.probability, names=names)

    @property
    def logits(self) -> nn.Parameter:
        return self.probability.raw

    def forward(self, x: Tensor) -> Tensor:
        check_real(self, x)
        if x.shape[-1:] != self.logits.shape:
            raise ValueError(f"x is {list(x.shape)}; pass [..., {len(self.logits)}], an entry for each feature.")
        mask = (
            concrete(self.probability.unconstrained(x), x.shape, self.temperature)
            if self.training
            else self.probability(x)
        )
        return x * mask.to(x.dtype)

    def to_ordinary(self) -> nn.Module:
        """Return a module that multiplies by the mean mask, in training mode too."""
        return traced(MeanMask(self.probability))

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}"


class MeanMask(nn.Module):
    """InputMask's evaluation mode, in operations that torch.fx can trace."""

    def __init__(self, probability: Learned) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        return x * self.probability().expand_as(x).type_as(x)  # expand_as raises for another number of features
