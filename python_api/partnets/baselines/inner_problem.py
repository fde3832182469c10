"""Inner: the weights of a bilevel problem, which learn from its training loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.optim import Optimizer

from partnets.training.start import check_finite
from partnets.utils.twice import twice_differentiable

Loss = Callable[[dict[str, Tensor], Tensor], Tensor]
# functools.partial(torch.optim.SGD, lr=0.1), say.
MakeOptimizer = Callable[..., Optimizer]


class Inner:
    """argmin_w f(w, λ), by steps of an optimiser that can be differentiated if asked for.

    Attributes:
        weights: the present ones, copies of the start.
        evaluations: how many gradients were evaluated so far.
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
        """Goes back to the start, and to a fresh optimiser."""
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
        """One step of the weights; with track, autograd follows it. check is for a first one: later, autograd's way
        from f to hyper is through all steps that it followed."""
        # Copies, because the optimiser changes in place what autograd keeps for the way back.
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
        """∂f/∂w of each weight; check asks as well whether f depends on hyper."""
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
        """Forgets what autograd followed; the weights and the optimiser's state keep their values."""
        for weight in self.weights.values():
            weight.grad = None
            weight.detach_()
            for state in self.optimizer.state[weight].values():
                if isinstance(state, Tensor):
                    state.detach_()


def evaluate(name: str, loss: Loss, weights: dict[str, Tensor], hyper: Tensor) -> Tensor:
    """The loss, which must be one finite number that autograd can follow, if it is to."""
    value = loss(weights, hyper)
    if not isinstance(value, Tensor) or value.dim():
        shown = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"{name}(weights, hyper) returned {shown}; return a scalar tensor, as loss.mean().")
    check_finite(value, name)
    if torch.is_grad_enabled() and not value.requires_grad:
        raise ValueError(
            f"{name}(weights, hyper) depends on neither; compute it from the weights and hyper that it is given, and"
            " without detach, item or torch.no_grad()."
        )
    return value


def check_tensors(weights: Mapping[str, Tensor]) -> None:
    if not isinstance(weights, Mapping) or not weights:
        raise ValueError(f"weights={weights!r}; pass a dict of tensors, as dict(model.named_parameters()).")
    for name, weight in weights.items():
        check_floating(f"weights[{name!r}]", weight)


def check_maker(name: str, maker: MakeOptimizer | None) -> None:
    if not callable(maker):
        raise ValueError(f"{name}={maker!r}; pass what makes one, as functools.partial(torch.optim.SGD, lr=0.1).")


def check_floating(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        shown = f"a tensor of {tensor.dtype}" if isinstance(tensor, Tensor) else repr(tensor)
        raise ValueError(f"{name} is {shown}; pass a tensor of floating point, and leave buffers to train itself.")


def raise_independent() -> None:
    raise ValueError(
        "the gradient of train(weights, hyper) does not depend on hyper; use hyper in train, without detach, item or"
        " torch.no_grad(), in a term that depends on the weights as well."
    )


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _keep_first_gradient(optimizer: Optimizer, group: dict) -> None:
    # torch.optim.SGD detaches the gradient that its momentum starts from; from a zero it is followed.
    if group["dampening"]:
        raise ValueError(f"dampening={group['dampening']} of the optimizer; pass 0, as others are not differentiated.")
    for parameter in group["params"]:
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
