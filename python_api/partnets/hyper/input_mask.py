"""InputMask: selects input features by a mask whose probabilities are learned."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from partnets.hyper.hyperparameter import Hyperparameter


class InputMask(Hyperparameter):
    """Multiplies the input by a random mask, one probability for each feature (Section 5, mask learning).

    In training, each example draws a mask of its own from the concrete relaxation of the Bernoulli distribution
    (Maddison et al. 2016), z = sigmoid((logit(p) + logit(u)) / temperature) with u ~ U(0, 1), through which the
    gradient reaches p. In evaluation the mask is its mean, p, as in dropout; predictions and L_ML are deterministic.

    Args:
        features: the number of features, the last dimension of x.
        probability: the initial p of each feature, in (0, 1).
        temperature: of the relaxation; the closer to 0, the closer the mask to {0, 1}.

    Attributes:
        logits: [features], the unconstrained parameter.

    Shapes:
        x [..., features], floating point, to the same.

    Raises:
        ValueError: features is below 1, probability is not in (0, 1), or temperature is not positive.

    Example:
        >>> mask = InputMask(3, probability=0.75).eval()
        >>> mask(torch.ones(1, 3))
        tensor([[0.7500, 0.7500, 0.7500]], grad_fn=<MulBackward0>)
    """

    def __init__(self, features: int, *, probability: float = 0.5, temperature: float = 0.1) -> None:
        super().__init__()
        if features < 1:
            raise ValueError(f"features={features}; pass at least 1.")
        if not 0 < probability < 1:
            raise ValueError(f"probability={probability}; pass a number between 0 and 1, both excluded.")
        if not temperature > 0:
            raise ValueError(f"temperature={temperature}; pass a positive number.")
        self.temperature = temperature
        self.logits = nn.Parameter(torch.full((features,), math.log(probability / (1 - probability))))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x * self.logits.sigmoid()
        noise = torch.rand_like(x).logit(eps=torch.finfo(x.dtype).eps)
        return x * ((self.logits + noise) / self.temperature).sigmoid()

    def values(self) -> dict[str, float]:
        """The probability of each feature, under its index."""
        return {str(i): p for i, p in enumerate(self.logits.detach().sigmoid().tolist())}

    def extra_repr(self) -> str:
        return f"features={len(self.logits)}, temperature={self.temperature}"
