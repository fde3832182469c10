"""Inner: the inner problem of a bilevel one, in which weights learn from a training loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.optim import Optimizer

from partnets.training.preflight import check_finite
from partnets.utils.twice import twice_differentiable

Loss = Callable[[dict[str, Tensor], Tensor], Tensor]
# For example functools.partial(torch.optim.SGD, lr=0.1).
MakeOptimizer = Callable[..., Optimizer]


class Inner:
    """The problem argmin_w f(w, λ), solved by steps of an optimiser, differentiable on request.

    Attributes:
        weights: the current weights, copies of the initial ones.
        evaluations: the number of gradient evaluations so far.
    """

    def __init__(
        self, train: Loss, weights: Mapping[str, Tensor], optimizer: MakeOptimizer | None, *, differentiable: bool
    ) -> None:
        check_tensors(weights)
        if optimizer is not None:
            check_maker("optimizer", optimizer)
        self.train, self.start, self.make, self.differentiable = train, dict(weights), optimizer, differentiable
        self.evaluations = 0
        self.restart()

    def restart(self) -> None:
        """Return to the initial weights, with a new optimiser."""
        self.weights = {name: weight.detach().clone() for name, weight in self.start.items()}
        if self.make is None:
            return
        parameters = list(self.weights.values())
        if not self.differentiable:
            self.optimizer = self.make(parameters)
            return
        self.optimizer = self.make(parameters, differentiable=True)
        for group in self.optimizer.param_groups:
            if group.get("momentum") and "dampening" in group:
                _keep_first_gradient(self.optimizer, group)

    def step(self, hyper: Tensor, *, track: bool = False, check: bool = False) -> None:
        """Take a step of the weights. With track, autograd records it; with check, raise if f is independent of hyper.

        Pass check in the first step only: later, autograd's path from f to hyper leads through all recorded steps.
        """
        # Copies, because the optimiser changes in place tensors that autograd saved for the backward pass.
        copies = {
            name: weight.clone() if weight.requires_grad else weight.clone().requires_grad_()
            for name, weight in self.weights.items()
        }
        gradients = self.gradient(copies, hyper, create_graph=track, check=check)
        for weight, gradient in zip(self.weights.values(), gradients, strict=True):
            weight.grad = gradient
        self.optimizer.step()

    def gradient(
        self, weights: dict[str, Tensor], hyper: Tensor, *, create_graph: bool = False, check: bool = False
    ) -> list[Tensor]:
        """Return ∂f/∂w of each weight; with check, also raise if f does not depend on hyper."""
        self.evaluations += 1
        with twice_differentiable() if create_graph else nullcontext():
            loss = evaluate("train", self.train, weights, hyper)
        inputs = [*weights.values(), *([hyper] if check else [])]
        gradients = torch.autograd.grad(loss, inputs, create_graph=create_graph, allow_unused=True)
        for name, gradient in zip(weights, gradients, strict=False):
            if gradient is None:
                raise ValueError(
                    f"train(weights, hyper) does not depend on weights[{name!r}]; leave it out, or look for a detach"
                    " or a torch.no_grad() in train."
                )
        if gradients[-1] is None:
            raise_independent()
        return list(gradients[: len(weights)])

    def copies(self) -> dict[str, Tensor]:
        return {name: weight.clone() for name, weight in self.weights.items()}

    def detach(self) -> None:
        """Drop autograd's graph; the weights and the optimiser's state keep their values."""
        for weight in self.weights.values():
            weight.grad = None
            weight.detach_()
            for state in self.optimizer.state[weight].values():
                if isinstance(state, Tensor):
                    state.detach_()


def evaluate(name: str, loss: Loss, weights: dict[str, Tensor], hyper: Tensor) -> Tensor:
    """Return the loss, checked to be one finite number, with a graph if gradients are enabled."""
    value = loss(weights, hyper)
    if not isinstance(value, Tensor) or value.dim():
        shown = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"{name}(weights, hyper) returned {shown}; return a scalar tensor, such as loss.mean().")
    check_finite(value, name)
    if torch.is_grad_enabled() and not value.requires_grad:
        raise ValueError(
            f"{name}(weights, hyper) depends on neither; compute it from these arguments, without detach, item or"
            " torch.no_grad()."
        )
    return value


def check_tensors(weights: Mapping[str, Tensor]) -> None:
    if not isinstance(weights, Mapping) or not weights:
        raise ValueError(f"weights={weights!r}; pass a dict of tensors, such as dict(model.named_parameters()).")
    for name, weight in weights.items():
        check_floating(f"weights[{name!r}]", weight)


def check_maker(name: str, maker: MakeOptimizer | None) -> None:
    if not callable(maker):
        raise ValueError(f"{name}={maker!r}; pass a function that makes one, such as functools.partial(SGD, lr=0.1).")


def check_floating(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        shown = f"a tensor of {tensor.dtype}" if isinstance(tensor, Tensor) else repr(tensor)
        raise ValueError(f"{name} is {shown}; pass a floating-point tensor, and leave buffers to the function train.")


def raise_independent() -> None:
    raise ValueError(
        "the gradient of train(weights, hyper) does not depend on hyper; use hyper in train, without detach, item or"
        " torch.no_grad(), in a term that depends on the weights as well."
    )


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _keep_first_gradient(optimizer: Optimizer, group: dict) -> None:
    # torch.optim.SGD detaches the gradient that initialises its momentum; with an initial zero it stays in the graph.
    if group["dampening"]:
        raise ValueError(f"dampening={group['dampening']} of the optimizer; pass 0, as others are not differentiated.")
    for parameter in group["params"]:
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
