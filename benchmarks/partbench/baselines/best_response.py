"""BestResponse: a hypernetwork from hyperparameters in a box to the best weights for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

Loss = Callable[[dict[str, Tensor], Tensor], Tensor]


class BestResponse:
    """A map from λ to all weights, trained on E f(w(λ), λ) for λ uniform in a box (Lorraine and Duvenaud 2018).

    It is linear, w(λ) = b + W z with λ's coordinates z in [-1, 1]ⁿ of the box, or has a hidden layer, w(λ) = b + W
    tanh(V z + c). W is initialised to 0 and b to the given weights.

    Args:
        train: f, a function of (weights, hyper) that returns a scalar.
        weights: the initial weights, by name.
        optimizer: makes a torch.optim optimiser of a list of parameters.
        box: the least and the greatest λ.
        hidden: number of hidden units; 0 for the linear map.
    """

    def __init__(
        self,
        train: Loss,
        weights: Mapping[str, Tensor],
        optimizer: Callable[[list[Tensor]], Optimizer],
        *,
        box: tuple[Tensor, Tensor],
        hidden: int,
        seed: int,
    ) -> None:
        self.train, self.box, self.start = train, box, dict(weights)
        self.generator = torch.Generator().manual_seed(seed)
        bias = torch.cat([weight.detach().reshape(-1) for weight in weights.values()])
        inputs = box[0].numel()
        self.parameters = {"W": bias.new_zeros(bias.numel(), hidden or inputs), "b": bias.clone()}
        if hidden:
            # Steep enough for the tanh to bend within the box.
            self.parameters["V"] = 2 / math.sqrt(inputs) * torch.randn(hidden, inputs, generator=self.generator)
            self.parameters["c"] = 2 * torch.randn(hidden, generator=self.generator)
        for parameter in self.parameters.values():
            parameter.requires_grad_()
        self.optimizer = optimizer(list(self.parameters.values()))

    def fit(self, steps: int) -> None:
        """Train the map."""
        low, high = self.box
        for _ in range(steps):
            place = torch.rand(low.shape, generator=self.generator, dtype=torch.float64).to(low)
            hyper = low + (high - low) * place
            self.optimizer.zero_grad()
            self.train(self.weights(hyper), hyper).backward()
            self.optimizer.step()

    def weights(self, hyper: Tensor) -> dict[str, Tensor]:
        """Return the weights for λ, differentiable in λ."""
        low, high = self.box
        features = (2 * (hyper - low) / (high - low) - 1).reshape(-1)
        if "V" in self.parameters:
            features = torch.tanh(self.parameters["V"] @ features + self.parameters["c"])
        found = self.parameters["b"] + self.parameters["W"] @ features
        parts = found.split([weight.numel() for weight in self.start.values()])
        return {name: part.view_as(start) for (name, start), part in zip(self.start.items(), parts, strict=True)}
