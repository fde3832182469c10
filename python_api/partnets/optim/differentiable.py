"""differentiable_step: a step of torch's optimisers as a differentiable function."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from partnets.optim import entrywise

# Added to gradients, so that roots of their squares have a derivative at 0; rounding removes it from other gradients.
LEAST = 1e-17
# Optimisers with steps that are not proportional to their learning rates.
OTHERWISE = (torch.optim.ASGD, torch.optim.Rprop)


def differentiable_step(
    optimizer: type[torch.optim.Optimizer],
    settings: Mapping,
    state: Mapping,
    entries: Tensor,
    grad: Tensor,
    rate: Tensor | None = None,
) -> tuple[Tensor, dict]:
    """Return a tensor and its state after a step of one of torch's optimisers; the arguments are left unchanged.

    Args:
        optimizer: the class, which must have the setting `differentiable`.
        settings: the settings of its group, by name.
        state: the tensor's state, by name; empty before the first step.
        entries, grad: tensors of one shape.
        rate: the learning rate as a tensor with a graph, in place of the rate in the settings.

    Raises:
        ValueError: a step of this optimiser is not differentiable, or not with these settings.

    Example:
        >>> rate = torch.tensor(0.5, requires_grad=True)
        >>> after, _ = differentiable_step(torch.optim.SGD, {}, {}, torch.zeros(2), torch.tensor([1.0, 3.0]), rate)
        >>> after.sum().backward()
        >>> after.tolist(), rate.grad.item()
        ([-0.5, -1.5], -4.0)
    """
    known = entrywise.arguments(optimizer)
    if "differentiable" not in known or (rate is not None and issubclass(optimizer, OTHERWISE)):
        what = "makes steps that are not proportional to its rate" if "differentiable" in known else "has none"
        raise ValueError(
            "autograd can differentiate the steps of optimisers that have `differentiable`, and"
            f" {optimizer.__name__} {what}; train by partnets.optim.SGD or Adam, or another of torch.optim."
        )
    state = {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}
    if settings.get("momentum") and issubclass(optimizer, torch.optim.SGD) and not state:
        # SGD detaches the gradient that becomes its first momentum; with a momentum of 0 before, it does not.
        if settings.get("dampening"):
            raise ValueError(
                f"the first step with dampening={settings['dampening']} cannot be differentiated; pass dampening=0."
            )
        state = {"momentum_buffer": torch.zeros_like(entries)}
    told = {**settings, "differentiable": True, "foreach": False, "fused": False}
    if rate is not None:
        told["lr"] = rate.item()
    # Steps are divided by their rate. At a rate of 0, as at the end of a schedule, the step is 0 times that of rate 1.
    if is_still := not issubclass(optimizer, OTHERWISE) and told.get("lr") == 0:
        told["lr"] = 1.0
    tensor = entries.clone()
    one = entrywise.make(optimizer, tensor, {name: told[name] for name in told.keys() & {*known, *settings}})
    tensor.grad = grad + LEAST
    if state:
        one.state[tensor] = state
    one.step()
    if is_still:
        return entries + (0.0 if rate is None else rate) * (tensor - entries), one.state[tensor]
    if rate is None:
        return tensor, one.state[tensor]
    # Few optimisers take a tensor as their rate; the steps of all are proportional to it.
    return entries + (rate / rate.detach()) * (tensor - entries), one.state[tensor]
