"""BestResponse: a hypernetwork from hyperparameters in a box to the best weights for them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from partbench.baselines.hypergradients import Hypergradient
from partbench.baselines.inner_problem import Inner, Loss, MakeOptimizer, check_tensors, evaluate, flat


class BestResponse:
    """A map from λ to all weights, trained on E f(w(λ), λ) for λ uniform in a box (Lorraine and Duvenaud 2018).

    It is linear, w(λ) = b + W z with λ's coordinates z in [-1, 1]ⁿ of the box, or has a hidden layer, w(λ) = b + W
    tanh(V z + c). W is initialised to 0 and b to the given weights. Calls return F and its gradient by λ through the
    map.
    """

    def __init__(
        self,
        train: Loss,
        validate: Loss,
        weights: Mapping[str, Tensor],
        optimizer: MakeOptimizer,
        *,
        box: tuple[Tensor, Tensor],
        hidden: int,
        seed: int,
        steps: int,
    ) -> None:
        check_tensors(weights)
        self.train, self.validate, self.box, self.steps = train, validate, box, steps
        self.start = dict(weights)
        self.generator = torch.Generator().manual_seed(seed)
        bias = flat(self.start.values()).detach()
        inputs = box[0].numel()
        start = {"W": bias.new_zeros(bias.numel(), hidden or inputs), "b": bias}
        if hidden:
            # Steep enough for the tanh to bend within the box.
            start["V"] = (
                2 / math.sqrt(inputs) * torch.randn(hidden, inputs, generator=self.generator, device="cpu").to(bias)
            )
            start["c"] = 2 * torch.randn(hidden, generator=self.generator, device="cpu").to(bias)
        self.inner = Inner(self._loss, start, optimizer, differentiable=False)

    def __call__(self, hyper: Tensor) -> Hypergradient:
        for step in range(self.steps):
            self.inner.step(self._draw(hyper).requires_grad_(step == 0), check=step == 0)
        self.steps = 0
        hyper = hyper.detach().clone().requires_grad_()
        weights = self._respond(self.inner.weights, hyper)
        loss = evaluate("validate", self.validate, weights, hyper)
        (gradient,) = torch.autograd.grad(loss, hyper)
        self.inner.evaluations += 1
        weights = {name: weight.detach().clone() for name, weight in weights.items()}
        return Hypergradient(gradient, loss.item(), weights, self.inner.evaluations)

    def _loss(self, parameters: dict[str, Tensor], hyper: Tensor) -> Tensor:
        # hyper is detached in the map, so that the check sees only f's direct dependence on λ.
        return self.train(self._respond(parameters, hyper.detach()), hyper)

    def _respond(self, parameters: dict[str, Tensor], hyper: Tensor) -> dict[str, Tensor]:
        low, high = self.box
        features = (2 * (hyper - low) / (high - low) - 1).reshape(-1).to(parameters["b"].dtype)
        if "V" in parameters:
            features = torch.tanh(parameters["V"] @ features + parameters["c"])
        weights = (parameters["b"] + parameters["W"] @ features).split([w.numel() for w in self.start.values()])
        pairs = zip(self.start.items(), weights, strict=True)
        return {name: weight.view(start.shape).to(start.dtype) for (name, start), weight in pairs}

    def _draw(self, hyper: Tensor) -> Tensor:
        low, high = self.box
        place = torch.rand(hyper.shape, generator=self.generator, dtype=torch.float64, device="cpu").to(hyper)
        return low + (high - low) * place
